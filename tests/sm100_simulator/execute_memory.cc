// ld, st, mov, cvta, mapa and their kin. PTX ISA, "Data Movement and Conversion Instructions".
#include "types.h"

namespace simulator {
namespace {

enum Space { kGeneric, kGlobal, kShared, kLocal, kParameter };

struct Access {  // in Details::numbers
  Space space;
  int size, count;  // bytes of an element, elements
  bool is_signed;
  // Of a load or store that synchronises: 1 relaxed, 2 acquires or releases.
  int synchronising;
};
Access access(Details const& d) {
  return {Space(d.numbers[0]), int(d.numbers[1] & 255), int(d.numbers[1] >> 8), d.numbers[2] != 0, int(d.numbers[3])};
}

// A lane's pointer, checked. Where `space` is generic the address tells which it is; `cta` is set for shared memory.
u8* resolve(Context& c, Access const& a, u64 address, bool write, Cta** cta, char const* what) {
  u32 const bytes = u32(a.size * a.count);
  if (address & (bytes - 1))
    fail("misaligned", "%s of %u bytes at address %#llx", what, bytes, (unsigned long long)address);
  Space space = a.space;
  if (space == kGeneric) space = address & kSharedTag ? kShared : address & kLocalTag ? kLocal : kGlobal;
  *cta = nullptr;
  switch (space) {
    case kShared: {
      u32 const shared = u32(address);
      Cta& owner = c.cluster.owner(shared, bytes, what);
      *cta = &owner;
      return &owner.shared[shared & kOffsetMask];
    }
    case kLocal:
      return nullptr;
    default:
      return c.machine.memory.check(address, bytes, write, what);
  }
}

u8* local(Context& c, u64 address, int lane, u32 bytes) {
  u64 const offset = address & ~kLocalTag;
  u32 const each = c.machine.launch->program->local_bytes;
  if (offset + bytes > each)
    fail("out_of_bounds", "local memory at offset %llu of %u bytes", (unsigned long long)offset, each);
  if (c.warp.local.empty()) c.warp.local.resize(size_t(each) * kLanes);
  return &c.warp.local[size_t(lane) * each + offset];
}

u64 lane_address(Context const& c, Op const& op, Details const& d, int lane) {
  Value const& v = d.values.back();
  return (v.size == 8 ? c.lanes<u64>(op.in[0])[lane] : u64(c.lanes<u32>(op.in[0])[lane])) +
         u64(i64(d.values[d.values.size() - 2].offset) << 32 >> 32);
}

void extend(u64 value, Access const& a, u8* out, int register_size) {
  if (a.is_signed && a.size < 8) value = u64(i64(value << (64 - 8 * a.size)) >> (64 - 8 * a.size));
  memcpy(out, &value, register_size);
}

Step load(Context& c, Op const& op) {
  Details const& d = details(c, op);
  Access const a = access(d);
  for (int l = 0; l < kLanes; ++l) {
    if (!(c.mask >> l & 1)) continue;
    u64 const address = lane_address(c, op, d, l);
    Cta* cta;
    u8 const* p = resolve(c, a, address, false, &cta, "a load");
    if (!p) p = local(c, address, l, u32(a.size * a.count));
    if (cta && !a.synchronising)
      cta->shadow.read(c.cluster, c.warp, cta->rank, u32(address) & kOffsetMask, u32(a.size * a.count));
    if (cta && a.synchronising) {
      cta->shadow.read_flag(cta->rank, u32(address) & kOffsetMask, u32(a.size * a.count));
      acquire_flag(*cta, c.warp, u32(address) & kOffsetMask, a.synchronising == 2);
    }
    for (int i = 0; i < a.count; ++i) {
      if (d.sink[i]) continue;
      Value const& v = d.values[i];
      u8* out = c.warp.file + v.offset + l * v.size;
      if (a.size == v.size) {
        memcpy(out, p + i * a.size, a.size);
      } else {
        u64 value = 0;
        memcpy(&value, p + i * a.size, a.size);
        extend(value, a, out, v.size);
      }
    }
  }
  return Step::kNext;
}

Step store(Context& c, Op const& op) {
  Details const& d = details(c, op);
  Access const a = access(d);
  for (int l = 0; l < kLanes; ++l) {
    if (!(c.mask >> l & 1)) continue;
    u64 const address = lane_address(c, op, d, l);
    Cta* cta;
    u8* p = resolve(c, a, address, true, &cta, "a store");
    if (!p) p = local(c, address, l, u32(a.size * a.count));
    if (cta) cta->shadow.write(c.cluster, c.warp, cta->rank, u32(address) & kOffsetMask, u32(a.size * a.count));
    if (cta && a.synchronising) {
      cta->shadow.forget_writer(u32(address) & kOffsetMask, u32(a.size * a.count));
      release_flag(*cta, c.warp, u32(address) & kOffsetMask, a.synchronising == 2);
    }
    for (int i = 0; i < a.count; ++i) {
      Value const& v = d.values[i];
      memcpy(p + i * a.size, c.warp.file + v.offset + l * v.size, a.size);
    }
  }
  if (a.synchronising == 2) c.warp.next_epoch();
  ++c.machine.progress;
  return Step::kNext;
}

Step load_parameter(Context& c, Op const& op) {  // the same for all lanes
  Details const& d = details(c, op);
  Access const a = access(d);
  u64 const offset = d.values.back().offset;
  auto const& parameters = c.machine.launch->parameters;
  if (offset + a.size * a.count > parameters.size())
    fail("out_of_bounds", "a load of parameters at offset %llu of %zu bytes", (unsigned long long)offset,
         parameters.size());
  for (int i = 0; i < a.count; ++i) {
    if (d.sink[i]) continue;
    u64 value = 0;
    memcpy(&value, &parameters[offset + i * a.size], a.size);
    for (int l = 0; l < kLanes; ++l)
      if (c.mask >> l & 1) extend(value, a, c.warp.file + d.values[i].offset + l * d.values[i].size, d.values[i].size);
  }
  return Step::kNext;
}

// ---- moves

template <class T>
Step move(Context& c, Op const& op) {
  T const* a = c.lanes<T>(op.in[0]);
  T r[kLanes];
  for (int l = 0; l < kLanes; ++l) r[l] = T(a[l] + T(op.immediate));
  c.store(op.out, r);
  return Step::kNext;
}
struct Wide128 {
  u64 v[2];
};
Step move128(Context& c, Op const& op) {
  Wide128 r[kLanes];
  memcpy(r, c.lanes<Wide128>(op.in[0]), sizeof r);
  c.store(op.out, r);
  return Step::kNext;
}

Step pack(Context& c, Op const& op) {
  Details const& d = details(c, op);
  int const size = int(d.numbers[0]), count = int(d.values.size()), part = size / count;
  u8* out = c.warp.file + op.out;
  for (int i = 0; i < count; ++i) {
    u8 const* in = c.warp.file + d.values[i].offset;
    int const stride = d.values[i].size;
    for (int l = 0; l < kLanes; ++l)
      if (c.mask >> l & 1) memcpy(out + l * size + i * part, in + l * stride, part);
  }
  return Step::kNext;
}
Step unpack(Context& c, Op const& op) {
  Details const& d = details(c, op);
  int const size = int(d.numbers[0]), count = int(d.values.size()), part = size / count;
  u8 copy[16 * kLanes];  // a destination may be the source
  memcpy(copy, c.warp.file + op.in[0], size_t(size) * kLanes);
  for (int i = 0; i < count; ++i) {
    if (d.sink[i]) continue;
    u8* out = c.warp.file + d.values[i].offset;
    int const stride = d.values[i].size;
    for (int l = 0; l < kLanes; ++l)
      if (c.mask >> l & 1) memcpy(out + l * stride, copy + l * size + i * part, part);
  }
  return Step::kNext;
}

Step to_generic(Context& c, Op const& op) {
  u64 const* a = c.lanes<u64>(op.in[0]);
  u64 r[kLanes];
  for (int l = 0; l < kLanes; ++l) r[l] = a[l] | u64(op.immediate);
  c.store(op.out, r);
  return Step::kNext;
}
Step from_generic(Context& c, Op const& op) {
  u64 const* a = c.lanes<u64>(op.in[0]);
  u64 r[kLanes];
  for (int l = 0; l < kLanes; ++l) r[l] = a[l] & ~u64(op.immediate);
  c.store(op.out, r);
  return Step::kNext;
}
Step is_space(Context& c, Op const& op) {
  u64 const* a = c.lanes<u64>(op.in[0]);
  u32 p = 0;
  for (int l = 0; l < kLanes; ++l) {
    bool const shared = a[l] & kSharedTag, local = a[l] & kLocalTag;
    bool const own = shared && u32(a[l]) >> kRankShift == c.cta.rank;
    bool const v = op.immediate == kShared  ? own
                   : op.immediate == kLocal ? local
                   : op.immediate == 100    ? shared
                                            : !shared && !local;
    p |= u32(v) << l;
  }
  c.store_predicate(op.out, p);
  return Step::kNext;
}

template <class T>
Step map_address(Context& c, Op const& op) {  // mapa: the same offset in another CTA of the cluster
  T const* a = c.lanes<T>(op.in[0]);
  u32 const* rank = c.lanes<u32>(op.in[1]);
  T r[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    if (c.mask >> l & 1 && rank[l] >= c.cluster.ctas.size())
      fail("out_of_bounds", "mapa of rank %u in a cluster of %zu CTAs", rank[l], c.cluster.ctas.size());
    r[l] = T((a[l] & ~T(~0u)) | (u32(a[l]) & kOffsetMask) | rank[l] << kRankShift);
  }
  c.store(op.out, r);
  return Step::kNext;
}
Step get_rank(Context& c, Op const& op) {
  u32 const* a = c.lanes<u32>(op.in[0]);
  u32 r[kLanes];
  for (int l = 0; l < kLanes; ++l) r[l] = a[l] >> kRankShift;
  c.store(op.out, r);
  return Step::kNext;
}

// ---- ldmatrix, stmatrix: 8x8 matrices of 16-bit elements; lane i of each group of eight gives a row's address

template <bool kStore>
Step matrix(Context& c, Op const& op) {
  if (!c.converged()) return Step::kBlocked;
  Details const& d = details(c, op);
  int const count = int(d.numbers[0]);
  bool const transposed = d.numbers[1];
  std::vector<u8*> rows(count * 8);
  for (int i = 0; i < count * 8; ++i) {
    u64 const address = lane_address(c, op, d, i);
    if (address & 15) fail("misaligned", "a matrix row at %#llx", (unsigned long long)address);
    u32 const shared = u32(address);
    Cta& cta = c.cluster.owner(shared, 16, "a matrix row");
    rows[i] = &cta.shared[shared & kOffsetMask];
    if (kStore)
      cta.shadow.write(c.cluster, c.warp, cta.rank, shared & kOffsetMask, 16);
    else
      cta.shadow.read(c.cluster, c.warp, cta.rank, shared & kOffsetMask, 16);
  }
  for (int m = 0; m < count; ++m) {
    for (int l = 0; l < kLanes; ++l) {
      for (int h = 0; h < 2; ++h) {
        int const row = l / 4, column = l % 4 * 2 + h;
        u16* element = reinterpret_cast<u16*>(rows[m * 8 + (transposed ? column : row)]) + (transposed ? row : column);
        u16* half = reinterpret_cast<u16*>(c.lanes<u32>(d.values[m].offset) + l) + h;
        if (kStore)
          *element = *half;
        else
          *half = *element;
      }
    }
  }
  return Step::kNext;
}

Space space_of(Statement const& s) {
  if (s.has("global") || s.has("const")) return kGlobal;
  if (s.has("shared") || s.has("shared::cta") || s.has("shared::cluster")) return kShared;
  if (s.has("local")) return kLocal;
  return kGeneric;
}

// The address goes to op.in[0]; its size and displacement into the two last values of `x`.
void decode_address(Decoder& d, Operand const& memory, Op& op, Details& x) {
  Value const v = d.address(memory);
  op.in[0] = v.offset;
  x.values.push_back({u32(i32(memory.offset)), 0, 0});
  x.values.push_back(v);
}

void decode_list(Decoder& d, Operand const& list, Details& x, bool write, int size) {
  auto one = [&](Operand const& o) {
    x.sink.push_back(o.kind == Operand::kSink);
    if (o.kind == Operand::kSink) {
      x.values.push_back({});
    } else if (write) {
      Value const v = d.reg(o);
      d.writes(v);
      x.values.push_back(v);
    } else if (o.kind == Operand::kRegister) {
      Value const v = d.reg(o);
      d.reads(v);
      x.values.push_back(v);
    } else {
      x.values.push_back(d.source(o, size));
    }
  };
  if (list.kind == Operand::kVector)
    for (Operand const& o : list.parts) one(o);
  else
    one(list);
}

bool decode_mov(Decoder& d, Statement const& s, Op& op) {
  Type const t = last_type(s);
  Operand const &to = s.operands[0], &from = s.operands[1];
  if (to.kind == Operand::kVector) {
    Details x;
    decode_list(d, to, x, true, 0);
    x.numbers[0] = u64(t.size);
    op.in[0] = d.source(from, t.size).offset;
    op.run = unpack;
    op.immediate = d.detail(x);
    return true;
  }
  if (from.kind == Operand::kVector) {
    Details x;
    decode_list(d, from, x, false, t.size / int(from.parts.size()));
    x.numbers[0] = u64(t.size);
    op.out = d.destination(to, t.size);
    op.run = pack;
    op.immediate = d.detail(x);
    return true;
  }
  op.out = d.destination(to, t.size);
  op.in[0] = d.source(from, t.size).offset;
  op.immediate = from.kind == Operand::kRegister || from.kind == Operand::kSpecial ? from.offset : 0;
  op.run = t.size == 1   ? move<u8>
           : t.size == 2 ? move<u16>
           : t.size == 4 ? move<u32>
           : t.size == 8 ? Handler(move<u64>)
                         : Handler(move128);
  return true;
}

}  // namespace

bool decode_memory(Decoder& d, Statement const& s, Op& op, Class& kind) {
  std::string const& b = s.base();
  kind = Class::kMove;
  if (b == "mov" && !s.has("pred")) {
    op.moves_data = true;
    return decode_mov(d, s, op);
  }
  if (b == "cvta") {
    op.moves_data = true;
    bool const to = s.has("to");
    bool const shared = space_of(s) == kShared, local = space_of(s) == kLocal;
    op.out = d.destination(s.operands[0], 8);
    op.in[0] = d.source(s.operands[1], 8).offset;
    op.immediate = i64(shared ? kSharedTag : local ? kLocalTag : 0);
    op.run = to ? from_generic : to_generic;
    return true;
  }
  if (b == "isspacep") {
    op.out = d.destination(s.operands[0]);
    op.in[0] = d.source(s.operands[1], 8).offset;
    op.immediate = s.has("shared::cluster") ? 100 : space_of(s);
    op.run = is_space;
    return true;
  }
  if (b == "mapa") {
    int const size = last_type(s).size;
    op.out = d.destination(s.operands[0], size);
    op.in[0] = d.source(s.operands[1], size).offset;
    op.in[1] = d.source(s.operands[2], 4).offset;
    op.run = size == 8 ? map_address<u64> : map_address<u32>;
    return true;
  }
  if (b == "getctarank") {
    op.out = d.destination(s.operands[0], 4);
    op.in[0] = d.source(s.operands[1], 4).offset;
    op.run = get_rank;
    if (last_type(s).size != 4 || !s.has("shared::cluster")) unsupported(s);
    return true;
  }
  if (b == "prefetch" || b == "prefetchu" || b == "applypriority" || b == "discard" || b == "createpolicy") {
    op.run = nothing;
    if (b == "createpolicy") {
      op.out = d.destination(s.operands[0], 8);
      op.in[0] = d.source(Operand{Operand::kImmediate}, 8).offset;
      op.run = move<u64>;
    }
    return true;
  }
  kind = Class::kMemory;
  if (b == "ldmatrix" || b == "stmatrix") {
    bool const st = b == "stmatrix";
    if (last_type(s).size != 2 || !s.has("m8n8")) unsupported(s);
    Details x;
    x.numbers[0] = s.has("x4") ? 4 : s.has("x2") ? 2 : 1;
    x.numbers[1] = s.has("trans");
    decode_list(d, s.operands[st ? 1 : 0], x, !st, 4);
    decode_address(d, s.operands[st ? 0 : 1], op, x);
    op.run = st ? matrix<true> : matrix<false>;
    op.immediate = d.detail(x);
    return true;
  }
  if (b != "ld" && b != "st" && b != "ldu") return false;
  bool const st = b == "st";
  if (s.has("async")) return false;
  Type const t = last_type(s);
  if (!t.kind) unsupported(s);
  int const count = s.has("v8") ? 8 : s.has("v4") ? 4 : s.has("v2") ? 2 : 1;
  int const synchronising = s.has("acquire") || s.has("release")                     ? 2
                            : s.has("volatile") || s.has("relaxed") || s.has("mmio") ? 1
                                                                                     : 0;
  Details x;
  Operand const &memory = s.operands[st ? 0 : 1], &data = s.operands[st ? 1 : 0];
  decode_list(d, data, x, !st, t.size);
  if (int(x.values.size()) != count) unsupported(s, "has another number of registers than its vector");
  bool const parameter = s.has("param") || s.has("param::entry");
  x.numbers[0] = parameter ? kParameter : space_of(s);
  x.numbers[1] = u64(t.size | count << 8);
  x.numbers[2] = t.kind == 's';
  x.numbers[3] = u64(synchronising);
  if (parameter) {
    if (st) unsupported(s, "stores to a parameter");
    if (memory.kind == Operand::kSymbol) {
      for (size_t i = 0; i < d.program.kernel->parameters.size(); ++i) {
        if (d.program.kernel->parameters[i].name != memory.name) continue;
        x.values.push_back({u32(i64(d.program.parameter_offsets[i]) + memory.offset), 0, 0});
        op.run = load_parameter;
        op.immediate = d.detail(x);
        return true;
      }
      unsupported(s, "names a parameter of a called function");
    }
    x.numbers[0] = kGlobal;
  }
  decode_address(d, memory, op, x);
  op.run = st ? store : load;
  op.immediate = d.detail(x);
  return true;
}

}  // namespace simulator
