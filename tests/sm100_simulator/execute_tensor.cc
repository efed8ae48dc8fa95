// tcgen05: allocation, loads and stores of tensor memory, copies into it, multiplication, commit.
#include "multiply.h"
#include "types.h"

namespace simulator {

void check_loads_finished(Cta const& cta, u32 column, u32 columns, u32 blocks) {
  for (Warp const& w : cta.warps)
    for (auto const& load : w.tensor_loads)
      if (load.blocks & blocks && load.column < column + columns && column < load.column + load.columns)
        fail("in_flight",
             "columns from %u of tensor memory are written, and warp %u of CTA %u has not waited (tcgen05.wait::ld) "
             "for its loads of them",
             column, w.index, cta.rank);
}

namespace {

// ---- allocation

Step allocate(Context& c, Op const& op) {
  if (!c.converged()) return Step::kBlocked;
  Details const& d = details(c, op);
  u32 const columns = c.uniform<u32>(op.in[1], "a column count");
  u32 const to = u32(read_lane(c, op.in[0], d.values[0].size, c.first_lane())) + u32(d.numbers[0]);
  if (columns < 32 || columns > kTensorColumns || columns & (columns - 1))
    fail("tensor_memory", "tcgen05.alloc of %u columns: a power of two from 32 to 512", columns);
  if (c.cta.tensor.relinquished) fail("tensor_memory", "tcgen05.alloc after tcgen05.relinquish_alloc_permit");
  u32 base;
  if (!c.cta.tensor.allocate(columns, base)) return Step::kBlocked;
  Cta& cta = c.cluster.owner(to, 4, "tcgen05.alloc");
  if (to & 3) fail("misaligned", "tcgen05.alloc writes its result at %#x", to);
  cta.shadow.write(c.cluster, c.warp, cta.rank, to & kOffsetMask, 4);
  memcpy(&cta.shared[to & kOffsetMask], &base, 4);
  ++c.machine.progress;
  return Step::kNext;
}

Step deallocate(Context& c, Op const& op) {
  if (!c.converged()) return Step::kBlocked;
  u32 const base = c.uniform<u32>(op.in[0], "an address"), columns = c.uniform<u32>(op.in[1], "a column count");
  if (base >> 16) fail("tensor_memory", "tcgen05.dealloc at lane %u", base >> 16);
  check_loads_finished(c.cta, base, columns, 0xff);
  c.cta.tensor.free(base, columns);
  ++c.machine.progress;
  return Step::kNext;
}

Step relinquish(Context& c, Op const&) {
  if (!c.converged()) return Step::kBlocked;
  c.cta.tensor.relinquished = true;
  return Step::kNext;
}

// ---- loads and stores. A shape says which rows and columns a lane's registers hold.

struct Cell {
  int lane, column;
};
enum Shape { k32x32b, k16x64b, k16x128b, k16x256b };
int per_repeat(Shape s) { return s == k32x32b || s == k16x64b ? 1 : s == k16x128b ? 2 : 4; }  // registers
int columns_per_repeat(Shape s) { return s == k32x32b ? 1 : s == k16x64b ? 2 : s == k16x128b ? 4 : 8; }

Cell cell(Shape s, int lane, int reg) {
  int const repeat = reg / per_repeat(s), r = reg % per_repeat(s), first = repeat * columns_per_repeat(s);
  switch (s) {
    case k32x32b:
      return {lane, first};
    case k16x64b:
      return {lane / 4 + lane % 2 * 8, first + lane / 2 % 2};
    case k16x128b:
      return {lane / 4 + r * 8, first + lane % 4};
    default:
      return {lane / 4 + r / 2 * 8, first + lane % 4 * 2 + r % 2};
  }
}

struct Area {
  u32 lane, column, columns, blocks;
};
Area area(Context& c, u32 address, Shape shape, int registers, char const* what) {
  u32 const lane = address >> 16, column = address & 0xffff;
  u32 const columns = u32(registers / per_repeat(shape) * columns_per_repeat(shape));
  bool const whole = shape == k32x32b;
  if (lane / 32 != c.warp.index % 4 || lane % (whole ? 32 : 16))
    fail("tensor_memory", "%s at lane %u: warp %u of a CTA reaches the lanes %u to %u", what, lane, c.warp.index,
         c.warp.index % 4 * 32, c.warp.index % 4 * 32 + 31);
  return {lane, column, columns, (whole ? 3u : 1u) << lane / 16};
}

Step tensor_load(Context& c, Op const& op) {
  if (!c.converged()) return Step::kBlocked;
  Details const& d = details(c, op);
  Shape const shape = Shape(d.numbers[0]);
  Area const a =
      area(c, c.uniform<u32>(op.in[0], "a tensor memory address"), shape, int(d.values.size()), "tcgen05.ld");
  Cta& cta = c.cta;
  cta.tensor.read(c.cluster, c.warp, cta.rank, a.column, a.columns, a.blocks, Stamp(), false, "tcgen05.ld");
  Warp& w = c.warp;
  auto fetch = [&w, &cta, &d, shape, a] {
    for (size_t r = 0; r < d.values.size(); ++r) {
      u32* out = reinterpret_cast<u32*>(w.file + d.values[r].offset);
      for (int l = 0; l < kLanes; ++l) {
        Cell const at = cell(shape, l, int(r));
        out[l] = cta.tensor.cells[(a.lane + u32(at.lane)) * kTensorColumns + a.column + u32(at.column)];
      }
    }
  };
  bool const allowed = c.machine.settings.allow_unwaited_loads, late = c.machine.settings.adversarial && !allowed;
  if (!late) fetch();
  for (Value const& v : d.values) w.written[v.id] = allowed ? kAllLanes : 0;
  w.tensor_loads.push_back({a.column, a.columns, a.blocks, late ? std::function<void()>(fetch) : nullptr, d.values});
  return Step::kNext;
}

Step wait_loads(Context& c, Op const&) {
  if (c.warp.tensor_loads.empty()) return Step::kNext;  // part of a warp may find out that there is nothing to wait for
  if (!c.converged()) fail("divergence", "tcgen05.wait::ld by a part of the warp, lanes %#x", c.mask);
  for (auto const& load : c.warp.tensor_loads) {
    if (load.fetch) load.fetch();
    for (Value const& v : load.values) c.warp.written[v.id] = kAllLanes;
    c.cta.tensor.mark_read(load.column, load.columns, load.blocks, c.warp.stamp());
  }
  c.warp.tensor_loads.clear();
  return Step::kNext;
}

Step tensor_store(Context& c, Op const& op) {
  if (!c.converged()) return Step::kBlocked;
  Details const& d = details(c, op);
  Shape const shape = Shape(d.numbers[0]);
  Area const a =
      area(c, c.uniform<u32>(op.in[0], "a tensor memory address"), shape, int(d.values.size()), "tcgen05.st");
  check_loads_finished(c.cta, a.column, a.columns, a.blocks);
  c.cta.tensor.write(c.cluster, c.warp, c.cta.rank, a.column, a.columns, a.blocks, c.warp.stamp(), false, "tcgen05.st");
  for (size_t r = 0; r < d.values.size(); ++r) {
    u32 const* in = c.lanes<u32>(d.values[r].offset);
    for (int l = 0; l < kLanes; ++l) {
      Cell const at = cell(shape, l, int(r));
      c.cta.tensor.cells[(a.lane + u32(at.lane)) * kTensorColumns + a.column + u32(at.column)] = in[l];
    }
  }
  return Step::kNext;
}

// ---- the tensor core's queue

// tcgen05.cp: rows of a matrix in shared memory into columns. numbers: CTAs, rows, pieces of 16 bytes a row
Step copy(Context& c, Op const& op) {
  Details const& d = details(c, op);
  int const ctas = int(d.numbers[0]), rows = int(d.numbers[1]), pieces = int(d.numbers[2]);
  int const l = c.first_lane();
  u32 const to = c.lanes<u32>(op.in[0])[l];
  MatrixDescriptor const from = parse_descriptor(c.lanes<u64>(op.in[1])[l]);
  u32 const pair = ctas == 2 ? c.cta.rank & ~1u : c.cta.rank;
  Stamp const stamp(c.cta.tensor_agent, c.cta.tensor_epoch);
  Cluster& cluster = c.cluster;
  for (int h = 0; h < ctas; ++h) {
    Cta& cta = cluster.owner((pair + u32(h)) << kRankShift | kReservedShared, 1, "tcgen05.cp");
    for (int r = 0; r < rows; ++r)
      for (int p = 0; p < pieces; ++p) {
        u32 const offset = k_major_offset(from, u32(r), u32(p));
        cluster.owner(cta.rank << kRankShift | offset, 16, "tcgen05.cp");
        cta.shadow.async_read(cluster, c.warp, cta.rank, offset, 16, stamp);
      }
    check_loads_finished(cta, to & 0xffff, u32(pieces) * 4, 0xff);
    cta.tensor.write(cluster, c.warp, cta.rank, to & 0xffff, u32(pieces) * 4, 0xff, stamp, true, "tcgen05.cp");
  }
  c.machine.later_in_order(c.cta, [&cluster, ctas, rows, pieces, to, from, pair] {
    for (int h = 0; h < ctas; ++h) {
      Cta& cta = *cluster.ctas[pair + u32(h)];
      for (int lane = 0; lane < int(kTensorLanes); ++lane)
        for (int p = 0; p < pieces; ++p)
          memcpy(&cta.tensor.cells[u32(lane) * kTensorColumns + (to & 0x1ff) + u32(p) * 4],
                 &cta.shared[k_major_offset(from, u32(lane % rows), u32(p))], 16);
    }
  });
  return Step::kNext;
}

// numbers: kind, CTAs, scale vector. in: d, a, b, instruction. values: scale factors of A and B, disabled lanes;
// numbers[3]: the predicate's offset, its negation in bit 32
Step multiply(Context& c, Op const& op) {
  Details const& d = details(c, op);
  if (__builtin_popcount(c.mask) != 1)
    fail("divergence", "tcgen05.mma is issued by %d lanes at once", __builtin_popcount(c.mask));
  int const l = c.first_lane();
  Multiply x{};
  x.kind = MultiplyKind(d.numbers[0]);
  x.ctas = int(d.numbers[1]);
  x.scale_vector = int(d.numbers[2]);
  x.rank = c.cta.rank;
  x.d = c.lanes<u32>(op.in[0])[l];
  x.a = c.lanes<u64>(op.in[1])[l];
  x.b = c.lanes<u64>(op.in[2])[l];
  x.instruction = c.lanes<u32>(op.in[3])[l];
  u32 p = c.predicate(u32(d.numbers[3]));
  if (d.numbers[3] >> 32) p = ~p;
  x.accumulate = p >> l & 1;
  if (x.scale_vector) {
    x.scale_a = c.lanes<u32>(d.values[0].offset)[l];
    x.scale_b = c.lanes<u32>(d.values[1].offset)[l];
  } else {
    for (size_t i = 0; i < d.values.size(); ++i) x.disabled_lanes[i] = c.lanes<u32>(d.values[i].offset)[l];
  }
  c.machine.later_in_order(c.cta, prepare_multiply(c, x));
  return Step::kNext;
}

Step commit(Context& c, Op const& op) {  // numbers: displacement, 1: multicast. values: mbarrier, mask
  Details const& d = details(c, op);
  if (__builtin_popcount(c.mask) != 1)
    fail("divergence", "tcgen05.commit by %d lanes at once", __builtin_popcount(c.mask));
  int const l = c.first_lane();
  u32 const barrier = u32(read_lane(c, op.in[0], d.values[0].size, l)) + u32(d.numbers[0]);
  c.cluster.mbarrier(barrier);
  u32 const ranks = d.numbers[1] ? u32(read_lane(c, d.values[1].offset, d.values[1].size, l)) & 0xffff
                                 : 1u << (barrier >> kRankShift);
  Cluster& cluster = c.cluster;
  Machine& m = c.machine;
  if (ranks >> cluster.ctas.size())
    fail("out_of_bounds", "tcgen05.commit to CTAs %#x of a cluster of %zu", ranks, cluster.ctas.size());
  u32 const agent = c.cta.tensor_agent, epoch = c.cta.tensor_epoch++;
  for (u32 r = 0; r < cluster.ctas.size(); ++r)
    if (ranks >> r & 1) usable_mbarrier(c, (barrier & kOffsetMask) | r << kRankShift);
  // What the issuing warp had seen comes before the multiplications, and so before their completion; its own accesses
  // do not.
  auto seen = std::make_shared<Clock>(c.warp.clock);
  seen->seen[c.warp.agent] = seen->fenced[c.warp.agent] = 0;
  seen->seen[agent] = epoch;
  m.later_in_order(c.cta, [&m, &cluster, ranks, barrier, seen, own = c.cta.rank] {
    for (u32 r = 0; r < cluster.ctas.size(); ++r) {
      if (!(ranks >> r & 1)) continue;
      auto const arrive = [&m, &cluster, seen, at = (barrier & kOffsetMask) | r << kRankShift] {
        Mbarrier& b = cluster.mbarrier(at);
        b.gathering.join(*seen);
        mbarrier_arrive(m, b, 1);
      };
      if (r == own) {
        arrive();
      } else {
        m.later(cluster, arrive);  // the way there takes a time of its own
      }
    }
  });
  return Step::kNext;
}

// ---- decoding

Shape shape_of(Statement const& s) {
  if (s.has("32x32b")) return k32x32b;
  if (s.has("16x64b")) return k16x64b;
  if (s.has("16x128b")) return k16x128b;
  if (s.has("16x256b")) return k16x256b;
  unsupported(s);
}

void decode_multiply(Decoder& d, Statement const& s, Op& op, Details& x) {
  static std::map<std::string, MultiplyKind> const kKinds{
      {"kind::f16", MultiplyKind::kF16},       {"kind::tf32", MultiplyKind::kTF32},
      {"kind::f8f6f4", MultiplyKind::kF8F6F4}, {"kind::mxf8f6f4", MultiplyKind::kMXF8F6F4},
      {"kind::mxf4", MultiplyKind::kMXF4},     {"kind::mxf4nvf4", MultiplyKind::kMXF4NVF4}};
  if (s.has("sp") || s.has("ws")) unsupported(s);
  bool known = false;
  for (std::string const& m : s.modifiers) {
    if (auto const found = kKinds.find(m); found != kKinds.end()) {
      x.numbers[0] = u64(found->second);
      known = true;
    } else if (m.compare(0, 6, "kind::") == 0 || m.compare(0, 11, "collector::") == 0 || m == "ashift") {
      if (m.compare(0, 11, "collector::") != 0) unsupported(s);
    }
  }
  if (!known || s.operands[1].memory) unsupported(s);
  MultiplyKind const kind = MultiplyKind(x.numbers[0]);
  bool const block = s.has("block_scale");
  if (block) {
    int const vector = s.has("scale_vec::1X")                       ? 1
                       : s.has("scale_vec::2X") || s.has("block32") ? (kind == MultiplyKind::kMXF8F6F4 ? 1 : 2)
                       : s.has("scale_vec::4X") || s.has("block16") ? 4
                       : kind == MultiplyKind::kMXF8F6F4            ? 1
                                                                    : 2;
    x.numbers[2] = u64(vector);
  }
  op.in[0] = d.address(s.operands[0]).offset;
  for (int i = 1; i < 3; ++i) op.in[i] = d.source(s.operands[i], 8).offset;
  op.in[3] = d.source(s.operands[3], 4).offset;
  size_t next = 4;
  if (block) {
    for (int i = 0; i < 2; ++i) x.values.push_back(d.address(s.operands[next++]));
  } else if (s.operands[next].kind == Operand::kVector) {
    for (Operand const& o : s.operands[next].parts) x.values.push_back(d.source(o, 4));
    ++next;
  }
  bool negated = false;
  x.numbers[3] = d.predicate(s.operands[next++], &negated).offset;
  if (negated) x.numbers[3] |= 1ull << 32;
  if (next != s.operands.size()) unsupported(s, "scales its accumulators");
  op.run = multiply;
}

}  // namespace

bool decode_tensor(Decoder& d, Statement const& s, Op& op, Class& kind) {
  if (s.base() != "tcgen05") return false;
  kind = Class::kTensor;
  std::string const& what = s.modifiers[1];
  u64 const ctas = s.has("cta_group::2") ? 2 : 1;
  Details x;
  if (what == "alloc") {
    x.values.push_back(d.address(s.operands[0]));
    op.in[0] = x.values[0].offset;
    x.numbers[0] = u64(s.operands[0].offset);
    op.in[1] = d.source(s.operands[1], 4).offset;
    op.run = allocate;
  } else if (what == "dealloc") {
    op.in[0] = d.source(s.operands[0], 4).offset;
    op.in[1] = d.source(s.operands[1], 4).offset;
    op.run = deallocate;
  } else if (what == "relinquish_alloc_permit") {
    op.run = relinquish;
  } else if (what == "ld" || what == "st") {
    bool const store = what == "st";
    if (s.has("pack::16b") || s.has("unpack::16b") || s.has("red")) unsupported(s);
    x.numbers[0] = u64(shape_of(s));
    Operand const &memory = s.operands[store ? 0 : 1], &list = s.operands[store ? 1 : 0];
    op.in[0] = d.address(memory).offset;
    if (memory.offset) unsupported(s, "has a displacement");
    for (Operand const& o : list.kind == Operand::kVector ? list.parts : std::vector<Operand>{list}) {
      Value const v = store ? d.source(o, 4) : d.reg(o);  // written when the wait says so
      x.values.push_back(v);
    }
    op.run = store ? tensor_store : tensor_load;
  } else if (what == "wait::ld") {
    op.run = wait_loads;
  } else if (what == "wait::st" || what.compare(0, 7, "fence::") == 0) {
    op.run = nothing;
  } else if (what == "cp") {
    if (s.has("b8x16")) unsupported(s);
    x.numbers[0] = ctas;
    if (s.has("32x128b") && s.has("warpx4"))
      x.numbers[1] = 32, x.numbers[2] = 1;
    else if (s.has("128x256b"))
      x.numbers[1] = 128, x.numbers[2] = 2;
    else if (s.has("128x128b"))
      x.numbers[1] = 128, x.numbers[2] = 1;
    else
      unsupported(s);
    op.in[0] = d.address(s.operands[0]).offset;
    op.in[1] = d.source(s.operands[1], 8).offset;
    op.run = copy;
  } else if (what == "mma") {
    x.numbers[1] = ctas;
    decode_multiply(d, s, op, x);
  } else if (what == "commit") {
    x.values.push_back(d.address(s.operands[0]));
    op.in[0] = x.values[0].offset;
    x.numbers[0] = u64(s.operands[0].offset);
    x.numbers[1] = s.has("multicast::cluster");
    if (x.numbers[1]) x.values.push_back(d.source(s.operands[1], 2));
    op.run = commit;
  } else {
    unsupported(s);
  }
  op.immediate = d.detail(x);
  return true;
}

}  // namespace simulator
