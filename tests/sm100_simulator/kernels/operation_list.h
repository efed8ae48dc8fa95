// A list of instructions, each applied to the same three words by every thread and its result written to its own row.
#pragma once
#include <cstdint>

// One row: `text` sets %0 from %1, %2, %3; h, t, d and p are scratch registers of 16, 32 and 64 bits and predicates.
// The tests read the texts out of the source to name a row that differs.
#define OPERATION(text)                                                                          \
  {                                                                                              \
    uint32_t result;                                                                             \
    asm volatile("{.reg .b16 h<4>; .reg .b32 t<4>; .reg .b64 d<4>; .reg .pred p<4>;\n" text ";}" \
                 : "=r"(result)                                                                  \
                 : "r"(x), "r"(y), "r"(z)                                                        \
                 : "memory");                                                                    \
    *out = result;                                                                               \
    out += stride;                                                                               \
  }
