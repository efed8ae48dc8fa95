// A kernel ready to run: statements decoded to handlers, registers laid out in a warp's register file.
#pragma once
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "ptx.h"

namespace simulator {

struct Context;
struct Op;

// What a handler did. kNext: go on. kJumped: the program counter is set. kBlocked: try the same instruction again
// later. kYield: done, but let others run before going on.
enum class Step : u8 { kNext, kJumped, kBlocked, kYield };
using Handler = Step (*)(Context&, Op const&);

// Where a value stands: `offset` bytes into the register file, lanes one after the other (a predicate is one mask of 32
// bits).
struct Value {
  u32 offset = 0, id = 0;
  int size = 0;
};

constexpr u32 kNone = ~0u;

struct Op {
  Handler run = nullptr;
  u32 out = kNone, out2 = kNone;
  u32 in[4] = {kNone, kNone, kNone, kNone};
  u32 guard = kNone;
  u32 ids = 0;  // in Program::ids: registers read, then written
  u8 reads = 0, writes = 0;
  bool guard_negated = false;
  bool moves_data = false;  // registers never written may be read: the result is then one as well
  bool selects = false;     // in[0] or in[1] by the predicate in[2]: what is not selected need not have been written
  u32 selected[2] = {kNone, kNone};  // their registers, if any
  i64 immediate = 0;                 // a displacement, a jump's target or an index into Program::details
};

// The operands of instructions that have many.
struct Details {
  std::vector<Value> values;  // destination or source list, coordinates
  std::vector<bool> sink;
  u64 numbers[4] = {0, 0, 0, 0};
  std::string text;
};

enum class Class : u8 {
  kInteger,
  kFloat,
  kConvert,
  kMove,
  kControl,
  kMemory,
  kShuffle,
  kBarrier,
  kCopy,
  kTensor,
  kOther
};
constexpr char const* kClassNames[] = {"integer", "float",   "convert", "move",   "control", "memory",
                                       "shuffle", "barrier", "copy",    "tensor", "other"};

struct Program {
  Kernel const* kernel = nullptr;
  std::vector<Op> code;
  std::vector<Class> classes;
  std::vector<u32> ids;
  std::vector<Details> details;
  u32 register_bytes = 0, register_count = 0;
  // What is added at run time: nothing, the CTA's window, the parameters' address.
  enum class Base : u8 { kNone, kShared, kParameters };
  struct Constant {
    Value value;
    u64 bits;
    Base base;
  };
  std::vector<Constant> constants;
  std::map<std::string, Value> special;
  u32 shared_bytes = 0;    // static shared memory
  u32 dynamic_shared = 0;  // offset of the dynamic shared memory behind it
  u32 local_bytes = 0;
  std::vector<u32> parameter_offsets;
  u32 parameter_bytes = 0;
};

// Builds Ops. The decode_* functions of the execute_*.cc files recognise their opcodes and return false for others.
class Decoder {
 public:
  Decoder(Module const& module, Kernel const& kernel, Program& program,
          std::unordered_map<std::string, u64> const& globals);
  void run();

  Value reg(Operand const& o) const;  // a register
  // What an instruction reads and writes, and the decoder notes as such.
  Value source(Operand const& o, int size);  // a register, a constant or a symbol's address, `size` bytes a lane
  Value predicate(Operand const& o, bool* negated = nullptr);
  u32 destination(Operand const& o, int size = -1);  // kNone for a sink
  u32 detail(Details details);
  Value address(Operand const& o);  // of a memory operand, without its displacement
  void reads(Value v);
  void writes(Value v);
  i64 number(Operand const& o) const;  // an immediate's value

  Program& program;

 private:
  Value allocate(int size);
  Value constant(u64 bits, int size, Program::Base base = Program::Base::kNone);
  void layout_memory();
  void decode(Statement const& s);

  Module const& module_;
  Kernel const& kernel_;
  std::vector<Value> registers_;
  std::map<std::tuple<u64, int, Program::Base>, Value> constants_;
  std::unordered_map<std::string, std::pair<u64, Program::Base>> symbols_;
  std::vector<u32> pending_reads_, pending_writes_;
};

bool decode_compare(Decoder&, Statement const&, Op&, Class&);
bool decode_integer(Decoder&, Statement const&, Op&, Class&);
bool decode_float(Decoder&, Statement const&, Op&, Class&);
bool decode_packed(Decoder&, Statement const&, Op&, Class&);
bool decode_convert(Decoder&, Statement const&, Op&, Class&);
bool decode_memory(Decoder&, Statement const&, Op&, Class&);
bool decode_atomic(Decoder&, Statement const&, Op&, Class&);
bool decode_control(Decoder&, Statement const&, Op&, Class&);
bool decode_lanes(Decoder&, Statement const&, Op&, Class&);
bool decode_barrier(Decoder&, Statement const&, Op&, Class&);
bool decode_copy(Decoder&, Statement const&, Op&, Class&);
bool decode_tensor(Decoder&, Statement const&, Op&, Class&);
bool decode_wgmma(Decoder&, Statement const&, Op&, Class&);

[[noreturn]] void unsupported(Statement const& s, char const* why = "is not known to the simulator");

}  // namespace simulator
