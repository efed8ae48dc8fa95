// wgmma, the tensor core of SM90: A and B in shared memory, named by descriptors, and accumulators in the registers of
// a warpgroup. Each of its four warps computes its 16 of the 64 rows, when it issues the instruction: nothing may write
// what is multiplied, or touch the accumulators, before the wait. PTX ISA, "Asynchronous Warpgroup Level Matrix
// Instructions". What the product uses, and what ran on an H200 in it: BF16, swizzles of 128 bytes.
#include <algorithm>

#include "multiply.h"
#include "numbers.h"
#include "types.h"

namespace simulator {

bool Warp::multiplies_into(u32 id) const {
  auto const has = [id](Multiplications const& group) {
    for (auto const* results : group.results)
      for (Value const& v : *results)
        if (v.id == id) return true;
    return false;
  };
  return has(open_multiplications) || std::any_of(multiplications.begin(), multiplications.end(), has);
}

namespace {

constexpr int kK = 16, kRows = 16;

MatrixDescriptor parse(u64 x) {
  if (x >> 46 & 0xffff || x >> 14 & 3 || x >> 30 & 3)
    fail("descriptor", "a base offset or reserved bits of the matrix descriptor %#llx are set", (unsigned long long)x);
  if (x >> 62 != 1) fail("unsupported", "swizzle mode %d of a wgmma's descriptor", int(x >> 62));
  return place_of(x, 3);
}

struct Matrix {
  MatrixDescriptor place;
  bool rows_contiguous;  // else K is

  // visit(offset, row, k) with the pieces of 16 bytes of `rows` rows from `first` on, and the first element of each.
  template <class Visit>
  void pieces(int first, int rows, Visit visit) const {
    if (rows_contiguous) {
      for (int k = 0; k < kK; ++k)
        for (int r = 0; r < rows; r += 8) visit(row_major_offset(place, u32(first + r) / 8, u32(k)), r, k);
    } else {
      for (int r = 0; r < rows; ++r)
        for (int k = 0; k < kK; k += 8) visit(k_major_offset(place, u32(first + r), u32(k) / 8), r, k);
    }
  }

  // out[k * stride + row]
  void read(u8 const* shared, int first, int rows, float* out, int stride) const {
    pieces(first, rows, [&](u32 offset, int row, int k) {
      for (int i = 0; i < 8; ++i) {
        u16 bits;
        memcpy(&bits, shared + offset + 2 * i, 2);
        int const at = rows_contiguous ? k * stride + row + i : (k + i) * stride + row;
        out[at] = bf16_to_float(bits);
      }
    });
  }
};

// numbers: N; the predicate's offset, with its negation in bit 32; the operands whose rows are contiguous, a bit each.
// values: accumulators
Step multiply(Context& c, Op const& op) {
  if (!c.converged()) return Step::kBlocked;
  Details const& d = details(c, op);
  int const n = int(d.numbers[0]), quarter = int(c.warp.index % 4);
  if (c.warp.index / 4 * 4 + 3 >= c.cta.warps.size()) fail("divergence", "wgmma without a whole warpgroup");
  Matrix const a{parse(c.uniform<u64>(op.in[0], "a matrix descriptor")), bool(d.numbers[2] & 1)};
  Matrix const b{parse(c.uniform<u64>(op.in[1], "a matrix descriptor")), bool(d.numbers[2] & 2)};
  u32 p = c.predicate(u32(d.numbers[1]));
  if (d.numbers[1] >> 32) p = ~p;
  if (p != 0 && p != kAllLanes) fail("divergence", "the lanes of a wgmma do not agree on whether it accumulates");
  auto& group = c.warp.open_multiplications;
  auto const touch = [&](u32 offset, int, int) {
    c.cluster.owner(c.cta.rank << kRankShift | offset, 16, "a matrix operand");
    c.cta.shadow.begin_bulk_read(c.cluster, c.warp, c.cta.rank, offset, 16);
    group.reads.push_back(offset);
  };
  a.pieces(quarter * kRows, kRows, touch);
  b.pieces(0, n, touch);
  if (p) {
    for (Value const& v : d.values)
      if (c.warp.written[v.id] != kAllLanes && !c.warp.multiplies_into(v.id))
        fail("uninitialised", "an accumulating wgmma has accumulators that were never written");
  }
  float left[kK * kRows], right[kK * 256], sums[kRows][256] = {};
  a.read(c.cta.shared.data(), quarter * kRows, kRows, left, kRows);
  b.read(c.cta.shared.data(), 0, n, right, n);
  for (int k = 0; k < kK; ++k)
    for (int row = 0; row < kRows; ++row)
      for (int column = 0; column < n; ++column)
        sums[row][column] = std::fma(left[k * kRows + row], right[k * n + column], sums[row][column]);
  for (size_t i = 0; i < d.values.size(); ++i) {
    float* const out = c.lanes<float>(d.values[i].offset);
    for (int l = 0; l < kLanes; ++l) {
      float const sum = sums[l / 4 + int(i / 2 % 2) * 8][int(i / 4) * 8 + l % 4 * 2 + int(i % 2)];
      out[l] = p ? out[l] + sum : sum;
    }
    c.warp.written[d.values[i].id] = 0;  // until the wait
  }
  group.results.push_back(&d.values);
  if (quarter == 0) {
    ++c.machine.traffic.multiplications;
    c.machine.traffic.multiply_cycles += 64. * n * kK / 2048;
  }
  return Step::kNext;
}

Step commit(Context& c, Op const&) {
  if (!c.converged()) return Step::kBlocked;
  c.warp.multiplications.push_back(std::move(c.warp.open_multiplications));
  c.warp.open_multiplications = {};
  return Step::kNext;
}

// numbers: groups that may stay in flight
Step wait(Context& c, Op const& op) {
  if (!c.converged()) return Step::kBlocked;
  auto& groups = c.warp.multiplications;
  while (groups.size() > details(c, op).numbers[0]) {
    Warp::Multiplications const group = std::move(groups.front());
    groups.pop_front();
    for (u32 offset : group.reads) c.cta.shadow.end_read(c.warp, offset, 16);
    for (auto const* results : group.results)
      for (Value const& v : *results)
        if (!c.warp.multiplies_into(v.id)) c.warp.written[v.id] = kAllLanes;
  }
  return Step::kNext;
}

void decode_multiply(Decoder& d, Statement const& s, Op& op, Details& x) {
  int m = 0, n = 0, k = 0;
  sscanf(s.modifiers[4].c_str(), "m%dn%dk%d", &m, &n, &k);
  bool const bf16 = s.modifiers[6] == "bf16" && s.modifiers[7] == "bf16";
  if (s.has("sp") || s.modifiers[5] != "f32" || !bf16 || k != kK) unsupported(s);
  if (s.operands.size() != 8 || s.operands[1].kind == Operand::kVector) unsupported(s, "has A in registers");
  if (m != 64 || n % 8 || n < 8 || n > 256 || int(s.operands[0].parts.size()) != n / 2)
    fail("ptx", "the shape of a wgmma: %s", s.text.c_str());
  for (Operand const& o : s.operands[0].parts) x.values.push_back(d.reg(o));  // written when the wait says so
  for (int i = 0; i < 2; ++i) op.in[i] = d.source(s.operands[1 + i], 8).offset;
  bool negated = false;
  x.numbers[0] = u64(n);
  x.numbers[1] = d.predicate(s.operands[3], &negated).offset | u64(negated) << 32;
  for (int i = 0; i < 2; ++i) {
    if (d.number(s.operands[4 + i]) != 1) unsupported(s, "negates an operand");
    x.numbers[2] |= u64(d.number(s.operands[6 + i]) != 0) << i;
  }
  op.run = multiply;
}

}  // namespace

bool decode_wgmma(Decoder& d, Statement const& s, Op& op, Class& kind) {
  if (s.base() != "wgmma") return false;
  kind = Class::kTensor;
  std::string const& what = s.modifiers[1];
  Details x;
  if (what == "mma_async") {
    decode_multiply(d, s, op, x);
  } else if (what == "commit_group") {
    op.run = commit;
  } else if (what == "wait_group") {
    x.numbers[0] = u64(d.number(s.operands[0]));
    op.run = wait;
  } else if (what == "fence") {
    op.run = nothing;
  } else {
    unsupported(s);
  }
  op.immediate = d.detail(x);
  return true;
}

}  // namespace simulator
