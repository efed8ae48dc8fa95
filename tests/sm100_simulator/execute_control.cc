// Jumps, the end of threads, and what steers the machine. PTX ISA, "Control Flow Instructions" and "Miscellaneous
// Instructions".
#include "types.h"

namespace simulator {
namespace {

Step branch(Context& c, Op const& op) {
  u32 const taken = c.mask, stays = c.group->mask & ~taken;
  if (!taken) return Step::kNext;
  if (!stays) {
    c.group->pc = u32(op.immediate);
    return Step::kJumped;
  }
  c.group->mask = stays;
  ++c.group->pc;
  c.warp.groups.push_back({taken, u32(op.immediate)});  // invalidates c.group
  return Step::kJumped;
}

Step leave(Context& c, Op const&) {
  c.warp.exited |= c.mask;
  c.group->mask &= ~c.mask;
  if (c.group->mask) ++c.group->pc;
  ++c.machine.progress;
  return Step::kJumped;
}

Step trap(Context& c, Op const& op) { fail("trap", "the kernel gave up: %s", details(c, op).text.c_str()); }

Step call(Context& c, Op const& op) {
  fail("unsupported", "a call that the compiler has not put in line: %s", details(c, op).text.c_str());
}

Step sleep(Context& c, Op const&) {
  c.machine.slept = true;
  return Step::kYield;
}

// The registers of a CTA's warps come from one pool of 64 K; an increase waits for others to give theirs up.
template <bool kIncrease>
Step set_registers(Context& c, Op const& op) {
  if (!c.converged()) return Step::kBlocked;
  u32 const wanted = u32(op.immediate), now = c.warp.registers;
  if (wanted % 8 || wanted < 24 || wanted > 256)
    fail("register", "setmaxnreg %u: a multiple of 8 from 24 to 256", wanted);
  if (kIncrease ? wanted < now : wanted > now)
    fail("register", "setmaxnreg.%s to %u with %u registers a thread", kIncrease ? "inc" : "dec", wanted, now);
  u32 const after = c.cta.registers_used + (wanted - now) * kLanes;
  if (kIncrease && after > 65536) return Step::kBlocked;
  c.cta.registers_used = after;
  c.warp.registers = wanted;
  ++c.machine.progress;
  return Step::kNext;
}

template <int kWhich>
Step read_clock(Context& c, Op const& op) {
  u64 const t = c.machine.traffic.instructions;
  if (op.immediate == 8) {
    u64 r[kLanes];
    for (u64& v : r) v = t;
    c.store(op.out, r);
  } else {
    u32 r[kLanes];
    for (u32& v : r) v = u32(kWhich ? t >> 32 : t);
    c.store(op.out, r);
  }
  return Step::kNext;
}

}  // namespace

bool decode_control(Decoder& d, Statement const& s, Op& op, Class& kind) {
  std::string const& b = s.base();
  kind = Class::kControl;
  if (b == "bra") {
    op.run = branch;
    op.immediate = s.target;
    return true;
  }
  if (b == "ret" || b == "exit") {
    op.run = leave;
    return true;
  }
  // printf says nothing, a failed assertion is a trap, and other functions are not known.
  bool const parameter_of_call =
      (b == "st" && s.has("param")) || (b == "ld" && s.has("param") && s.operands[1].kind == Operand::kSymbol &&
                                        s.operands[1].name.compare(0, 6, "retval") == 0);
  if (parameter_of_call) {
    op.run = nothing;
    for (Operand const& o : s.operands)
      if (o.kind == Operand::kRegister && !o.memory && b == "ld") d.writes(d.reg(o));
    return true;
  }
  if (b == "trap" || b == "brkpt" || b == "call") {
    Details x;
    x.text = s.text;
    auto calls = [&](char const* name) { return s.label.find(name) != std::string::npos; };
    op.run = b != "call" || calls("__assertfail") ? trap : calls("vprintf") ? nothing : call;
    op.immediate = d.detail(x);
    return true;
  }
  if (b == "nanosleep") {
    op.run = sleep;
    return true;
  }
  if (b == "pmevent" || b == "griddepcontrol") {  // launches are in order, and each is complete before the next begins
    op.run = nothing;
    return true;
  }
  if (b == "setmaxnreg") {
    op.run = s.has("inc") ? set_registers<true> : set_registers<false>;
    op.immediate = d.number(s.operands[0]);
    return true;
  }
  if (b == "mov" && s.operands.size() == 2 && s.operands[1].kind == Operand::kSpecial) {
    std::string const& name = s.operands[1].name;
    if (name != "%clock" && name != "%clock_hi" && name != "%clock64" && name != "%globaltimer" &&
        name != "%globaltimer_lo" && name != "%globaltimer_hi")
      return false;
    int const size = last_type(s).size;
    op.out = d.destination(s.operands[0], size);
    op.immediate = size;
    op.run = name.find("_hi") != std::string::npos ? read_clock<1> : read_clock<0>;
    return true;
  }
  return false;
}

}  // namespace simulator
