// Asynchronous copies: bulk and tensor (TMA), tensor maps, cluster-launch control. PTX ISA, "Data Movement and
// Conversion Instructions: Asynchronous copy", "Tensor Map Modification", "clusterlaunchcontrol".
#include "tensor_map.h"
#include "types.h"

namespace simulator {
namespace {

// A memory operand: its value, then its displacement.
struct Address {
  Value value;
  i64 displacement;
  u64 at(Context const& c, int lane) const { return read_lane(c, value.offset, value.size, lane) + u64(displacement); }
  u32 shared(Context const& c, int lane) const { return u32(at(c, lane)); }
};
Address take(Details const& d, int slot) { return {d.values[slot], i32(d.values[slot + 1].offset)}; }

void put(Decoder& d, Operand const& memory, Details& x) {
  x.values.push_back(d.address(memory));
  x.values.push_back({u32(i32(memory.offset)), 0, 0});
}

TensorMap read_map(Context& c, u64 address, int rank) {
  if (address % 64) fail("tensor_map", "a tensor map at %#llx: a multiple of 64", (unsigned long long)address);
  TensorMap map;
  memcpy(&map, c.machine.memory.check(address, sizeof map, false, "a tensor map"), sizeof map);
  if (std::string const problem = map.problem(); !problem.empty())
    fail("tensor_map", "the tensor map at %#llx: %s", (unsigned long long)address, problem.c_str());
  if (map.rank != rank) fail("tensor_map", "a copy of %d dimensions with a tensor map of rank %d", rank, map.rank);
  if (auto const written = c.machine.maps_written.find(address); written != c.machine.maps_written.end()) {
    auto const acquired = c.warp.acquired_maps.find(address);
    if (acquired == c.warp.acquired_maps.end() || acquired->second < written->second)
      fail("tensor_map", "the tensor map at %#llx was changed by this launch, and no fence.proxy.tensormap acquires it",
           (unsigned long long)address);
  }
  return map;
}

void check_alignment(u32 shared, u32 multiple) {
  if (shared % multiple)
    fail("misaligned", "an asynchronous copy at shared address %#x: a multiple of %u", shared, multiple);
}

// Found on an H200, where other places are an illegal instruction; the documents do not say so.
void check_place(TensorMap const& map, std::array<i32, 5> const& at, bool store) {
  if (i64(at[0]) * map.element_bits() % 128)
    fail("misaligned", "a tensor copy at element %d of dimension 0, of %d bits each: a multiple of 16 bytes", at[0],
         map.element_bits());
  for (int i = 0; store && i < map.rank; ++i)
    if (at[i] < 0) fail("out_of_bounds", "a tensor store at coordinate %d of dimension %d", at[i], i);
}

// A lane's tensor map and place, checked; the coordinates begin at d.values[first].
struct Box {
  TensorMap map;
  std::array<i32, 5> at;
};
Box read_box(Context& c, Details const& d, u64 map, size_t first, int lane, u32 shared, bool store) {
  int const rank = int(d.numbers[0]);
  Box box{read_map(c, map, rank), {}};
  for (int i = 0; i < rank; ++i) box.at[i] = i32(read_lane(c, d.values[first + i].offset, 4, lane));
  check_place(box.map, box.at, store);
  check_alignment(shared, 128);
  return box;
}

// ---- loads. numbers: 0 dimensions (0: bulk), 1 bits: 1 multicast, 2 CTA pair, 4 from shared memory. values:
// destination, source or tensor map, mbarrier (two each), then the mask or size, then coordinates

// The barrier that a copy into CTA `rank` reports to.
u32 barrier_address(u32 barrier, u32 rank, bool multicast, bool pair) {
  if (pair) return (barrier & kOffsetMask) | ((rank & ~1u) | (barrier >> kRankShift & 1)) << kRankShift;
  return multicast ? (barrier & kOffsetMask) | rank << kRankShift : barrier;
}

void start_load(Context& c, u32 shared, u32 bytes, u32 barrier, std::function<void(u32)> copy) {
  Cluster& cluster = c.cluster;
  Cta& cta = cluster.owner(shared, bytes, "an asynchronous copy");
  usable_mbarrier(c, barrier);
  cta.shadow.begin_async_write(cluster, c.warp, cta.rank, shared & kOffsetMask, bytes);
  ++cta.copies_in_flight;
  ++c.machine.traffic.loads;
  c.machine.traffic.load_bytes += bytes;
  Machine& m = c.machine;
  if (m.settings.adversarial) memset(&cta.shared[shared & kOffsetMask], 0xff, bytes);
  m.later(cluster, [&m, &cluster, &cta, shared, bytes, barrier, copy] {
    copy(shared);
    Mbarrier& b = cluster.mbarrier(barrier);
    cta.shadow.end_async_write(shared & kOffsetMask, bytes, b.next_completion());
    --cta.copies_in_flight;
    mbarrier_complete_bytes(m, b, bytes);
  });
}

Step load(Context& c, Op const& op) {
  Details const& d = details(c, op);
  int const rank = int(d.numbers[0]);
  bool const multicast = d.numbers[1] & 1, pair = d.numbers[1] & 2, from_shared = d.numbers[1] & 4;
  Address const to = take(d, 0), from = take(d, 2), bar = take(d, 4);
  for (int l = 0; l < kLanes; ++l) {
    if (!(c.mask >> l & 1)) continue;
    u32 const shared = to.shared(c, l), barrier = bar.shared(c, l);
    c.cluster.owner(shared, 1, "an asynchronous copy");
    u32 const ranks =
        multicast ? u32(read_lane(c, d.values[6].offset, d.values[6].size, l)) & 0xffff : 1u << (shared >> kRankShift);
    if (ranks >> c.cluster.ctas.size())
      fail("out_of_bounds", "a multicast to CTAs %#x of a cluster of %zu", ranks, c.cluster.ctas.size());
    Machine& m = c.machine;
    Cluster& cluster = c.cluster;
    u32 bytes;
    std::function<void(u32)> copy;
    if (rank) {
      Box const box = read_box(c, d, from.at(c, l), 7, l, shared, false);
      bytes = box.map.box_bytes();
      copy = [&m, &cluster, box](u32 destination) { load_box(m, cluster, box.map, destination, box.at.data()); };
    } else {
      bytes = u32(read_lane(c, d.values[7].offset, d.values[7].size, l));
      u64 const source = from.at(c, l);
      check_alignment(shared, 16);
      if (bytes % 16 || source % 16)
        fail("misaligned", "a bulk copy of %u bytes from %#llx: multiples of 16", bytes, (unsigned long long)source);
      if (from_shared) {
        Cta& owner = cluster.owner(u32(source), bytes, "a bulk copy");
        owner.shadow.begin_bulk_read(cluster, c.warp, owner.rank, u32(source) & kOffsetMask, bytes);
        copy = [&cluster, source, bytes, barrier](u32 destination) {
          Cta& owner = cluster.owner(u32(source), bytes, "a bulk copy");
          u32 const offset = u32(source) & kOffsetMask;
          memmove(cluster.pointer(destination, bytes, "a bulk copy"), &owner.shared[offset], bytes);
          owner.shadow.end_bulk_read(offset, bytes, cluster.mbarrier(barrier).next_completion());
        };
      } else {
        copy = [&m, &cluster, source, bytes](u32 destination) {
          memcpy(cluster.pointer(destination, bytes, "a bulk copy"),
                 m.memory.check(source, bytes, false, "a bulk copy"), bytes);
        };
      }
    }
    if (!multicast && !pair && !from_shared && (barrier ^ shared) >> kRankShift)
      fail("mbarrier", "a copy into CTA %u reports to an mbarrier of CTA %u", shared >> kRankShift,
           barrier >> kRankShift);
    for (u32 r = 0; r < c.cluster.ctas.size(); ++r)
      if (ranks >> r & 1)
        start_load(c, (shared & kOffsetMask) | r << kRankShift, bytes, barrier_address(barrier, r, multicast, pair),
                   copy);
  }
  return Step::kNext;
}

// ---- stores and reductions. numbers: 0 dimensions, 1 element type of a bulk reduction. text: the reduction. values:
// tensor map or destination, source (two each), size, coordinates

Step store(Context& c, Op const& op) {
  Details const& d = details(c, op);
  int const rank = int(d.numbers[0]);
  Address const to = take(d, 0), from = take(d, 2);
  for (int l = 0; l < kLanes; ++l) {
    if (!(c.mask >> l & 1)) continue;
    u32 const shared = from.shared(c, l);
    if (shared >> kRankShift != c.cta.rank) fail("out_of_bounds", "a bulk store out of another CTA's shared memory");
    Machine& m = c.machine;
    Cluster& cluster = c.cluster;
    u32 bytes;
    std::function<std::vector<u8>()> gather;
    std::function<void(std::vector<u8> const&)> write;
    std::string const function = d.text;
    bool overhangs = false;  // part of the box is not stored, and need not have been written
    if (rank) {
      Box const box = read_box(c, d, to.at(c, l), 5, l, shared, true);
      bytes = box.map.box_bytes();
      for (int i = 0; i < rank; ++i) overhangs |= u64(box.at[size_t(i)]) + box.map.box[i] > box.map.dimension[i];
      gather = [&cluster, box, shared] { return gather_box(cluster, box.map, shared); };
      write = [&m, box, function](std::vector<u8> const& data) {
        write_box(m, box.map, box.at.data(), data, function);
      };
    } else {
      bytes = u32(read_lane(c, d.values[4].offset, d.values[4].size, l));
      u64 const destination = to.at(c, l);
      check_alignment(shared, 16);
      if (bytes % 16 || destination % 16)
        fail("misaligned", "a bulk copy of %u bytes to %#llx: multiples of 16", bytes, (unsigned long long)destination);
      Element const element = Element(d.numbers[1]);
      gather = [&cluster, shared, bytes] {
        u8 const* p = cluster.pointer(shared, bytes, "a bulk copy");
        return std::vector<u8>(p, p + bytes);
      };
      write = [&m, destination, element, function](std::vector<u8> const& data) {
        u8* out = m.memory.check(destination, data.size(), true, "a bulk copy");
        if (function.empty())
          memcpy(out, data.data(), data.size());
        else
          reduce_elements(element, function, out, data.data(), u32(data.size()));
      };
    }
    Cta& cta = c.cluster.owner(shared, bytes, "a bulk store");
    cta.shadow.begin_bulk_read(cluster, c.warp, cta.rank, shared & kOffsetMask, bytes, overhangs);
    auto& group = c.warp.open_groups[l];
    if (!group) group = std::make_shared<BulkGroup>();
    group->lane = l;
    group->reads.push_back({shared & kOffsetMask, bytes});
    ++group->unread;
    ++group->unwritten;
    c.warp.bulk_lanes |= 1u << l;
    (function.empty() ? m.traffic.stores : m.traffic.reductions) += 1;
    (function.empty() ? m.traffic.store_bytes : m.traffic.reduction_bytes) += bytes;
    m.later(cluster, [&m, &cluster, group = group, gather, write] {
      auto data = std::make_shared<std::vector<u8>>(gather());
      --group->unread;
      ++m.progress;
      m.later(cluster, [&m, group, write, data] {
        write(*data);
        --group->unwritten;
        ++m.progress;
      });
    });
  }
  return Step::kNext;
}

Step commit_group(Context& c, Op const&) {
  for (int l = 0; l < kLanes; ++l) {
    if (!(c.mask & c.warp.bulk_lanes) || !(c.mask >> l & c.warp.bulk_lanes >> l & 1)) continue;
    auto& open = c.warp.open_groups[l];
    if (!open) open = std::make_shared<BulkGroup>();
    open->lane = l;
    c.warp.bulk_groups.push_back(std::move(open));
    open.reset();
  }
  return Step::kNext;
}

Step wait_group(Context& c, Op const& op) {  // immediate: how many may remain; 1 << 32: only their reads
  u32 const remain = u32(op.immediate);
  bool const reads_only = op.immediate >> 32;
  auto& groups = c.warp.bulk_groups;
  u32 after[kLanes] = {};  // later groups of the same lane
  std::vector<size_t> over;
  for (size_t i = groups.size(); i-- > 0;) {
    int const l = groups[i]->lane;
    if (!(c.mask >> l & 1) || after[l]++ < remain) continue;
    if (groups[i]->unread || (!reads_only && groups[i]->unwritten)) return Step::kBlocked;
    over.push_back(i);
  }
  for (size_t i : over) {
    for (auto const& r : groups[i]->reads) c.cta.shadow.end_bulk_read(r.address, r.bytes, c.warp.stamp());
    groups[i]->reads.clear();
    if (groups[i]->unwritten == 0) groups.erase(groups.begin() + long(i));
  }
  return Step::kNext;
}

// ---- tensor maps

enum Field { kAddress, kRank, kBox, kDimension, kStride, kElementStride, kElement, kInterleave, kSwizzle, kFill };

Step replace(Context& c,
             Op const& op) {  // numbers: field, 1: in shared memory. values: address, displacement, new value, index
  Details const& d = details(c, op);
  int const l = c.first_lane();
  u64 const at = take(d, 0).at(c, l), value = read_lane(c, d.values[2].offset, d.values[2].size, l),
            index = read_lane(c, d.values[3].offset, 4, l);
  u8* p;
  if (d.numbers[1]) {
    Cta& cta = c.cluster.owner(u32(at), sizeof(TensorMap), "tensormap.replace");
    p = &cta.shared[u32(at) & kOffsetMask];
    cta.shadow.read(c.cluster, c.warp, cta.rank, u32(at) & kOffsetMask, sizeof(TensorMap));
    cta.shadow.write(c.cluster, c.warp, cta.rank, u32(at) & kOffsetMask, sizeof(TensorMap));
  } else {
    p = c.machine.memory.check(at, sizeof(TensorMap), true, "tensormap.replace");
    c.machine.maps_written[at] = ++c.machine.map_time;
  }
  TensorMap map;
  memcpy(&map, p, sizeof map);
  if (map.magic != TensorMap::kMagic)
    fail("tensor_map", "tensormap.replace at %#llx, which holds no tensor map", (unsigned long long)at);
  if (index > 4) fail("tensor_map", "tensormap.replace of dimension %llu", (unsigned long long)index);
  static Element const kElements[] = {Element::kU8,        Element::kU16, Element::kU32,      Element::kS32,
                                      Element::kU64,       Element::kS64, Element::kF16,      Element::kF32,
                                      Element::kF32Flush,  Element::kF64, Element::kBF16,     Element::kTF32,
                                      Element::kTF32Flush, Element::kU4,  Element::kU4Padded, Element::kU6Padded};
  switch (Field(d.numbers[0])) {
    case kAddress:
      map.base = value;
      break;
    case kRank:
      map.rank = u8(value + 1);
      break;
    case kBox:
      map.box[index] = u16(value);
      break;
    case kDimension:
      map.dimension[index] = u32(value);
      break;
    case kStride:
      map.stride[index & 3] = value;
      break;
    case kElementStride:
      map.element_stride[index] = u8(value);
      break;
    case kElement:
      map.element = kElements[value & 15];
      break;
    case kInterleave:
      map.interleave = u8(value);
      break;
    case kSwizzle:
      map.swizzle = u8(value);
      break;
    case kFill:
      map.nan_fill = u8(value);
      break;
  }
  memcpy(p, &map, sizeof map);
  return Step::kNext;
}

Step publish_map(Context& c, Op const& op) {  // tensormap.cp_fenceproxy: shared to global memory
  if (!c.converged()) return Step::kBlocked;
  Details const& d = details(c, op);
  int const l = c.first_lane();
  u64 const to = take(d, 0).at(c, l);
  u32 const from = take(d, 2).shared(c, l);
  Cta& cta = c.cluster.owner(from, sizeof(TensorMap), "tensormap.cp_fenceproxy");
  cta.shadow.read(c.cluster, c.warp, cta.rank, from & kOffsetMask, sizeof(TensorMap));
  memcpy(c.machine.memory.check(to, sizeof(TensorMap), true, "tensormap.cp_fenceproxy"),
         &cta.shared[from & kOffsetMask], sizeof(TensorMap));
  c.machine.maps_written[to] = ++c.machine.map_time;
  return Step::kNext;
}

// ---- cluster-launch control: the answer is {x, y, z, whether a cluster was taken}

Step try_cancel(Context& c, Op const& op) {
  Details const& d = details(c, op);
  int const l = c.first_lane();
  u32 const to = take(d, 0).shared(c, l), barrier = take(d, 2).shared(c, l);
  u32 answer[4] = {};
  answer[3] = c.machine.cancel_cluster(answer);
  std::vector<u32> const data(answer, answer + 4);
  check_alignment(to, 16);
  for (u32 r = 0; r < c.cluster.ctas.size(); ++r) {
    if (!d.numbers[0] && r != to >> kRankShift) continue;
    Cluster& cluster = c.cluster;
    start_load(c, (to & kOffsetMask) | r << kRankShift, 16, (barrier & kOffsetMask) | r << kRankShift,
               [&cluster, data](u32 destination) {
                 memcpy(cluster.pointer(destination, 16, "clusterlaunchcontrol"), data.data(), 16);
               });
  }
  return Step::kNext;
}

Step query_cancel(Context& c, Op const& op) {  // immediate: 3 whether one was taken, 0 to 2 a coordinate
  u32 const* answer = c.lanes<u32>(op.in[0]);
  u32 r[kLanes], p = 0;
  for (int l = 0; l < kLanes; ++l) {
    r[l] = answer[l * 4 + (op.immediate & 3)];
    p |= u32(r[l] != 0) << l;
  }
  if (op.immediate == 3)
    c.store_predicate(op.out, p);
  else
    c.store(op.out, r);
  return Step::kNext;
}
Step query_first(Context& c, Op const& op) {
  Details const& d = details(c, op);
  for (int i = 0; i < 4; ++i) {
    if (d.sink[i]) continue;
    u32 r[kLanes];
    for (int l = 0; l < kLanes; ++l) r[l] = c.lanes<u32>(op.in[0])[l * 4 + i];
    c.store(d.values[i].offset, r);
  }
  return Step::kNext;
}

// ---- decoding

int dimensions(Statement const& s) {
  for (int i = 1; i <= 5; ++i)
    if (s.has((std::to_string(i) + "d").c_str())) return i;
  return 0;
}
size_t position(Statement const& s, char const* prefix) {
  for (size_t i = 1; i < s.modifiers.size(); ++i)
    if (s.modifiers[i].compare(0, strlen(prefix), prefix) == 0) return i;
  return 999;
}

void decode_bulk(Decoder& d, Statement const& s, Op& op, bool reduces) {
  bool const tensor = s.has("tensor"), loads = position(s, "shared") < position(s, "global") && !reduces;
  if (tensor && (position(s, "im2col") != 999 || position(s, "tile::") != 999)) unsupported(s);
  Details x;
  x.numbers[0] = u64(dimensions(s));
  if (loads) {
    bool const multicast = s.has("multicast::cluster"), from_shared = position(s, "global") == 999;
    x.numbers[1] = (multicast ? 1 : 0) | (s.has("cta_group::2") ? 2 : 0) | (from_shared ? 4 : 0);
    size_t const size = tensor ? 0 : 1;  // a bulk copy has its size before the mbarrier
    put(d, s.operands[0], x);
    put(d, s.operands[1], x);
    put(d, s.operands[2 + size], x);
    x.values.push_back(multicast ? d.source(s.operands[3 + size], 2) : Value{});
    if (tensor)
      for (Operand const& o : s.operands[1].parts) x.values.push_back(d.source(o, 4));
    else
      x.values.push_back(d.source(s.operands[2], 4));
    op.run = load;
  } else {
    size_t const map = 0, source = 1;
    put(d, s.operands[map], x);
    put(d, s.operands[source], x);
    x.values.push_back(tensor ? Value{} : d.source(s.operands[2], 4));
    if (tensor)
      for (Operand const& o : s.operands[map].parts) x.values.push_back(d.source(o, 4));
    if (reduces) {
      for (char const* f : {"add", "min", "max", "inc", "dec", "and", "or", "xor"})
        if (s.has(f)) x.text = f;
      if (!tensor) {
        Type const t = last_type(s);
        x.numbers[1] = u64(t.kind == 'h'   ? Element::kBF16
                           : t.kind == 'f' ? (t.size == 2   ? Element::kF16
                                              : t.size == 4 ? Element::kF32
                                                            : Element::kF64)
                           : t.size == 4   ? (t.kind == 's' ? Element::kS32 : Element::kU32)
                                           : (t.kind == 's' ? Element::kS64 : Element::kU64));
      }
    }
    if (!s.has("bulk_group")) unsupported(s);
    op.run = store;
  }
  op.immediate = d.detail(x);
}

}  // namespace

bool decode_copy(Decoder& d, Statement const& s, Op& op, Class& kind) {
  std::string const& b = s.base();
  kind = Class::kCopy;
  if (b == "cp") {
    if (!s.has("bulk")) unsupported(s);
    if (s.has("prefetch")) {
      op.run = nothing;
    } else if (s.has("commit_group")) {
      op.run = commit_group;
    } else if (s.has("wait_group")) {
      op.run = wait_group;
      op.immediate = d.number(s.operands[0]) | (s.has("read") ? i64(1) << 32 : 0);
    } else {
      decode_bulk(d, s, op, s.has("reduce"));
    }
    return true;
  }
  if (b == "tensormap") {
    Details x;
    if (s.has("cp_fenceproxy")) {
      put(d, s.operands[0], x);
      put(d, s.operands[1], x);
      op.run = publish_map;
    } else {
      static std::map<std::string, Field> const kFields{{"global_address", kAddress},
                                                        {"rank", kRank},
                                                        {"box_dim", kBox},
                                                        {"global_dim", kDimension},
                                                        {"global_stride", kStride},
                                                        {"element_stride", kElementStride},
                                                        {"elemtype", kElement},
                                                        {"interleave_layout", kInterleave},
                                                        {"swizzle_mode", kSwizzle},
                                                        {"fill_mode", kFill}};
      auto const field = s.modifiers.size() > 3 ? kFields.find(s.modifiers[3]) : kFields.end();
      if (field == kFields.end()) unsupported(s);
      x.numbers[0] = u64(field->second);
      x.numbers[1] = position(s, "shared") != 999;
      put(d, s.operands[0], x);
      bool const indexed = s.operands.size() == 3;
      Operand const& value = s.operands[indexed ? 2 : 1];
      x.values.push_back(d.source(value, s.has("b64") ? 8 : 4));
      x.values.push_back(d.source(indexed ? s.operands[1] : Operand{Operand::kImmediate}, 4));
      op.run = replace;
    }
    op.immediate = d.detail(x);
    return true;
  }
  if (b == "clusterlaunchcontrol") {
    Details x;
    if (s.has("try_cancel")) {
      x.numbers[0] = s.has("multicast::cluster::all");
      put(d, s.operands[0], x);
      put(d, s.operands[1], x);
      op.run = try_cancel;
      op.immediate = d.detail(x);
      return true;
    }
    op.in[0] = d.source(s.operands[1], 16).offset;
    if (s.has("is_canceled")) {
      op.out = d.destination(s.operands[0]);
      op.immediate = 3;
      op.run = query_cancel;
      return true;
    }
    if (s.operands[0].kind == Operand::kVector) {
      for (Operand const& o : s.operands[0].parts) {
        x.sink.push_back(o.kind != Operand::kRegister);
        x.values.push_back(o.kind == Operand::kRegister ? d.reg(o) : Value{});
        if (o.kind == Operand::kRegister) d.writes(d.reg(o));
      }
      op.run = query_first;
      op.immediate = d.detail(x);
      return true;
    }
    op.immediate = s.has("get_first_ctaid::x") ? 0 : s.has("get_first_ctaid::y") ? 1 : 2;
    op.out = d.destination(s.operands[0], 4);
    op.run = query_cancel;
    return true;
  }
  return false;
}

}  // namespace simulator
