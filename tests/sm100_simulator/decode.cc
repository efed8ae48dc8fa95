// Statements to Ops: the register file's layout, constants, and the families of opcodes in turn.
#include "types.h"

namespace simulator {

void unsupported(Statement const& s, char const* why) {
  fail("unsupported", "%s: %s (%s)", s.opcode.c_str(), why, s.text.c_str());
}

namespace {

u32 round_up(u32 x, u32 multiple) { return (x + multiple - 1) / multiple * multiple; }

}  // namespace

Decoder::Decoder(Module const& module, Kernel const& kernel, Program& program,
                 std::unordered_map<std::string, u64> const& globals)
    : program(program), module_(module), kernel_(kernel) {
  program.kernel = &kernel;
  for (Register const& r : kernel.registers) registers_.push_back(allocate(r.size));
  for (auto const& [name, address] : globals) symbols_[name] = {address, Program::Base::kNone};
  layout_memory();
}

Value Decoder::allocate(int size) {
  u32 const bytes = size == 0 ? 4 : u32(size) * kLanes;
  program.register_bytes = round_up(program.register_bytes, bytes >= 64 ? 64 : 4);
  Value const v{program.register_bytes, program.register_count++, size};
  program.register_bytes += bytes;
  return v;
}

void Decoder::layout_memory() {
  u32 offset = 0;
  for (Variable const& p : kernel_.parameters) {
    offset = round_up(offset, u32(p.alignment));
    program.parameter_offsets.push_back(offset);
    symbols_[p.name] = {offset, Program::Base::kParameters};
    offset += u32(p.bytes);
  }
  program.parameter_bytes = offset;
  u32 shared = kReservedShared, dynamic_alignment = 16;
  auto place = [&](Variable const& v) {
    if (v.external) {
      dynamic_alignment = std::max(dynamic_alignment, u32(v.alignment));
      return;
    }
    shared = round_up(shared, u32(v.alignment));
    symbols_[v.name] = {shared, Program::Base::kShared};
    shared += u32(v.bytes);
  };
  for (Variable const& v : module_.shared)
    if (v.external || module_.kernels.size() == 1) place(v);
  // A module's shared variables belong to the kernels that name them.
  for (Variable const& v : module_.shared) {
    if (v.external || module_.kernels.size() == 1) continue;
    bool used = false;
    for (Statement const& s : kernel_.statements) used |= s.text.find(v.name) != std::string::npos;
    if (used) place(v);
  }
  for (Variable const& v : kernel_.shared) place(v);
  program.shared_bytes = shared - kReservedShared;
  program.dynamic_shared = round_up(shared, dynamic_alignment);
  for (Variable const& v : module_.shared)
    if (v.external) symbols_[v.name] = {program.dynamic_shared, Program::Base::kShared};
  u32 local = 0;
  for (Variable const& v : kernel_.local) {
    local = round_up(local, u32(v.alignment));
    symbols_[v.name] = {local, Program::Base::kNone};
    local += u32(v.bytes);
  }
  program.local_bytes = local;
}

Value Decoder::constant(u64 bits, int size, Program::Base base) {
  auto const key = std::make_tuple(bits, size, base);
  if (auto const found = constants_.find(key); found != constants_.end()) return found->second;
  Value const v = allocate(size);
  program.constants.push_back({v, bits, base});
  constants_[key] = v;
  return v;
}

Value Decoder::reg(Operand const& o) const {
  if (o.kind != Operand::kRegister) fail("ptx", "an operand is not a register");
  return registers_[o.reg];
}

Value Decoder::source(Operand const& o, int size) {
  switch (o.kind) {
    case Operand::kRegister: {
      Value const v = registers_[o.reg];
      if (v.size != size)
        fail("ptx", "register %s has %d bytes where %d are read", kernel_.registers[o.reg].name.c_str(), v.size, size);
      reads(v);
      return v;
    }
    case Operand::kImmediate: {
      u64 bits = o.immediate;
      if (o.is_float && size == 8 && bits >> 32 == 0) bits = bit_cast<u64>(double(bit_cast<float>(u32(bits))));
      return constant(bits, size);
    }
    case Operand::kSymbol: {
      auto const found = symbols_.find(o.name);
      if (found == symbols_.end()) fail("ptx", "symbol %s is not known", o.name.c_str());
      return constant(found->second.first + u64(o.offset), size, found->second.second);
    }
    case Operand::kSpecial: {
      auto found = program.special.find(o.name);
      if (found == program.special.end()) found = program.special.emplace(o.name, allocate(4)).first;
      if (size != 4) fail("ptx", "special register %s is read as %d bytes", o.name.c_str(), size);
      return found->second;
    }
    default:
      fail("ptx", "an operand can't be read");
  }
}

Value Decoder::predicate(Operand const& o, bool* negated) {
  if (negated) *negated = o.negated;
  if (o.kind == Operand::kImmediate) return constant(o.immediate ? ~0ull : 0, 0);
  Value const v = reg(o);
  reads(v);
  return v;
}

u32 Decoder::destination(Operand const& o, int size) {
  if (o.kind == Operand::kSink) return kNone;
  Value const v = reg(o);
  if (size >= 0 && v.size != size)
    fail("ptx", "register %s has %d bytes where %d are written", kernel_.registers[o.reg].name.c_str(), v.size, size);
  writes(v);
  return v.offset;
}

Value Decoder::address(Operand const& o) {
  Operand base = o;
  base.offset = 0;
  if (o.kind == Operand::kRegister) {
    Value const v = registers_[o.reg];
    reads(v);
    return v;
  }
  return source(base, 8);
}

void Decoder::reads(Value v) { pending_reads_.push_back(v.id); }
void Decoder::writes(Value v) { pending_writes_.push_back(v.id); }

u32 Decoder::detail(Details details) {
  program.details.push_back(std::move(details));
  return u32(program.details.size() - 1);
}

i64 Decoder::number(Operand const& o) const {
  if (o.kind != Operand::kImmediate) fail("ptx", "an operand is not a number");
  return i64(o.immediate);
}

void Decoder::decode(Statement const& s) {
  Op op;
  Class kind = Class::kOther;
  pending_reads_.clear();
  pending_writes_.clear();
  static constexpr auto kFamilies = {decode_control, decode_lanes,  decode_memory,  decode_compare, decode_integer,
                                     decode_float,   decode_packed, decode_convert, decode_atomic,  decode_barrier,
                                     decode_copy,    decode_tensor, decode_wgmma};
  bool known = false;
  for (auto family : kFamilies) {
    op = Op();
    pending_reads_.clear();
    pending_writes_.clear();
    known = family(*this, s, op, kind);
    if (known) break;
  }
  if (!known || !op.run) unsupported(s);
  if (s.guard >= 0) {
    op.guard = registers_[s.guard].offset;
    op.guard_negated = s.guard_negated;
    pending_reads_.insert(pending_reads_.begin(), registers_[s.guard].id);
  }
  op.ids = u32(program.ids.size());
  op.reads = u8(pending_reads_.size());
  op.writes = u8(pending_writes_.size());
  if (pending_reads_.size() > 255 || pending_writes_.size() > 255) fail("ptx", "too many operands: %s", s.text.c_str());
  program.ids.insert(program.ids.end(), pending_reads_.begin(), pending_reads_.end());
  program.ids.insert(program.ids.end(), pending_writes_.begin(), pending_writes_.end());
  program.code.push_back(op);
  program.classes.push_back(kind);
}

void Decoder::run() {
  for (Statement const& s : kernel_.statements) {
    try {
      decode(s);
    } catch (Failure const& f) {
      throw Failure(f.category, std::string(f.what()) + "\n  in " + kernel_.name + ": " + s.text);
    }
  }
  Statement end;
  end.text = end.opcode = "ret";
  end.modifiers = {"ret"};
  decode(end);
}

}  // namespace simulator
