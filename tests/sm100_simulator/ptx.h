// PTX text to statements: directives, scopes, registers, labels and operands, with no meaning given to any opcode.
#pragma once
#include <map>
#include <string>
#include <vector>

#include "base.h"

namespace simulator {

// A register's type matters by its size alone: 0 for predicates, else bytes per lane.
struct Register {
  std::string name;
  int size;
};

struct Operand {
  enum Kind { kRegister, kImmediate, kSymbol, kSpecial, kVector, kSink } kind = kSink;
  int reg = -1;           // kRegister
  u64 immediate = 0;      // kImmediate: the bits
  bool is_float = false;  // an immediate written as 0f... (32 bits) or 0d... (64 bits)
  std::string name;       // kSymbol, kSpecial
  bool memory = false;    // [operand + offset, {coordinates}]
  bool negated = false;   // !predicate
  i64 offset = 0;
  std::vector<Operand> parts;  // kVector's elements; of a memory operand its coordinates; of %a|%b the second half
};

struct Statement {
  std::string text;                    // as written, for messages and counts
  std::string opcode;                  // with its modifiers
  std::vector<std::string> modifiers;  // the opcode's parts; [0] is its base name
  std::vector<Operand> operands;
  int guard = -1;
  bool guard_negated = false;
  std::string label;  // bra's target
  int target = -1;

  bool has(char const* modifier) const;
  std::string const& base() const { return modifiers[0]; }
};

struct Variable {
  std::string name;
  int alignment = 1;
  u64 bytes = 0;
  std::vector<u8> initial;
  bool external = false;
};

struct Kernel {
  std::string name;
  std::vector<Variable> parameters;
  std::vector<Variable> shared;  // declared inside the kernel
  std::vector<Variable> local;
  std::vector<Register> registers;
  std::vector<Statement> statements;
  u32 max_threads[3] = {0, 0, 0};  // .maxntid, 0 if absent
  bool exact_threads = false;      // .reqntid
  u32 cluster[3] = {0, 0, 0};      // .reqnctapercluster
  u32 max_registers = 0;           // .maxnreg
};

struct Module {
  std::vector<Variable> global, shared, constant;  // at module scope
  std::vector<Kernel> kernels;
};

Module parse_ptx(std::string const& text);

}  // namespace simulator
