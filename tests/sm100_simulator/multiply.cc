#include "multiply.h"

#include "numbers.h"

namespace simulator {

MatrixDescriptor parse_descriptor(u64 x) {
  if ((x >> 46 & 7) != 1)
    fail("descriptor", "bits 46 to 48 of the shared-memory descriptor %#llx: 0b001", (unsigned long long)x);
  if (x >> 53 & 0xff || x >> 14 & 3 || x >> 30 & 3)
    fail("descriptor", "reserved bits of the shared-memory descriptor %#llx are set", (unsigned long long)x);
  if (x >> 49 & 15)
    fail("descriptor",
         "a base offset or an absolute leading dimension in the descriptor %#llx is not known to the simulator",
         (unsigned long long)x);
  int swizzle;
  switch (x >> 61) {
    case 0:
      swizzle = 0;
      break;
    case 6:
      swizzle = 1;
      break;
    case 4:
      swizzle = 2;
      break;
    case 2:
      swizzle = 3;
      break;
    default:
      fail("descriptor", "swizzle mode %d of a shared-memory descriptor", int(x >> 61));
  }
  return place_of(x, swizzle);
}

MatrixDescriptor place_of(u64 x, int swizzle) {
  MatrixDescriptor const d{u32(x & 0x3fff) << 4, u32(x >> 16 & 0x3fff) << 4, u32(x >> 32 & 0x3fff) << 4, swizzle};
  // A swizzle's pattern repeats every 8 rows of its span; a start within the first row advances along K.
  u32 const span = 16u << swizzle;
  if (swizzle && d.start % (8 * span) >= span)
    fail("descriptor", "a matrix with a swizzle of %u bytes starts at %#x: its pattern needs a multiple of %u", span,
         d.start, 8 * span);
  return d;
}

u32 k_major_offset(MatrixDescriptor const& d, u32 row, u32 piece) {
  u32 const span = 16u << d.swizzle;
  u32 const along = d.swizzle ? piece * 16 : piece * d.leading;
  return swizzled(d.start + row / 8 * d.stride + row % 8 * span + along, d.swizzle);
}

u32 row_major_offset(MatrixDescriptor const& d, u32 piece, u32 k) {
  u32 const wide = 1u << d.swizzle;  // pieces of a swizzle's span
  if (!d.swizzle) return d.start + piece * d.stride + k % 8 * 16 + k / 8 * d.leading;
  return swizzled(d.start + piece % wide * 16 + piece / wide * d.leading + k % 8 * (wide * 16) + k / 8 * d.stride,
                  d.swizzle);
}

namespace {

struct Instruction {  // the fields of the instruction descriptor
  int m, n, format_a, format_b, scale_id_a, scale_id_b;
  bool negate_a, negate_b, rows_a, rows_b;  // rows_*: contiguous along M or N
  bool e8m0;
};

int element_k(MultiplyKind kind) {
  switch (kind) {
    case MultiplyKind::kF16:
      return 16;
    case MultiplyKind::kTF32:
      return 8;
    case MultiplyKind::kMXF4:
    case MultiplyKind::kMXF4NVF4:
      return 64;
    default:
      return 32;
  }
}

bool scaled(MultiplyKind kind) {
  return kind == MultiplyKind::kMXF8F6F4 || kind == MultiplyKind::kMXF4 || kind == MultiplyKind::kMXF4NVF4;
}
bool fp4_only(MultiplyKind kind) { return kind == MultiplyKind::kMXF4 || kind == MultiplyKind::kMXF4NVF4; }

Instruction parse_instruction(Multiply const& x) {
  u32 const i = x.instruction;
  Instruction r{};
  r.n = int(i >> 17 & 63) * 8;
  r.m = int(i >> 24 & 31) * 16;
  r.format_a = i >> 7 & 7;
  r.format_b = i >> 10 & 7;
  r.negate_a = i >> 13 & 1;
  r.negate_b = i >> 14 & 1;
  r.rows_a = i >> 15 & 1;
  r.rows_b = i >> 16 & 1;
  auto bad = [&](char const* what) { fail("descriptor", "instruction descriptor %#x: %s", i, what); };
  if (i & 7) bad("sparsity is not known to the simulator, and bit 2 and below must be 0");
  bool const block = scaled(x.kind);
  if (block) {
    r.scale_id_b = i >> 4 & 3;
    r.scale_id_a = i >> 29 & 3;
    r.e8m0 = i >> 23 & 1;
    if (i & (1u << 3 | 1u << 6)) bad("a reserved bit is set");
    if (i >> 31) bad("K = 96 is not of this architecture");
    if (x.kind != MultiplyKind::kMXF4NVF4 && !r.e8m0) bad("the scale factors of this kind are UE8M0");
    if (x.kind == MultiplyKind::kMXF4NVF4 && x.scale_vector == 2 && !r.e8m0)
      bad("scale factors of 32 elements are UE8M0");
    if (x.scale_vector == 2 && (r.scale_id_a & 1 || r.scale_id_b & 1))
      bad("the scale factor ids of two a row are 0 and 2");
    if (x.scale_vector == 4 && (r.scale_id_a || r.scale_id_b)) bad("the scale factor id of four a row is 0");
  } else {
    if ((i >> 4 & 3) != 1) bad("accumulators other than FP32 are not known to the simulator");
    if (i >> 3 & 1 || i >> 6 & 1 || i >> 23 & 1 || i >> 29) bad("a reserved or unsupported bit is set");
  }
  auto format_ok = [&](int f) {
    switch (x.kind) {
      case MultiplyKind::kF16:
        return f < 2;
      case MultiplyKind::kTF32:
        return f == 2;
      case MultiplyKind::kMXF4:
      case MultiplyKind::kMXF4NVF4:
        return f == 1;
      default:
        return f == 0 || f == 1 || f == 3 || f == 4 || f == 5;
    }
  };
  if (!format_ok(r.format_a) || !format_ok(r.format_b)) bad("a format that this kind does not have");
  if (fp4_only(x.kind) && (r.rows_a || r.rows_b)) bad("4-bit operands are K-major");
  bool const m_ok = block ? r.m == 128 * x.ctas : x.ctas == 1 ? r.m == 64 || r.m == 128 : r.m == 128 || r.m == 256;
  if (!m_ok) bad("M is not one of this kind and group");
  int const step = x.ctas == 2 ? 16 : block || r.m == 64 ? 8 : 16;
  if (r.n < step || r.n > 256 || r.n % step) bad("N is not one of this kind, group and M");
  return r;
}

// One operand as floats, [k][row], from up to two CTAs.
class MatrixOperand {
 public:
  MatrixOperand(MultiplyKind kind, int format, bool row_major, bool negate, MatrixDescriptor d)
      : kind_(kind), format_(format), row_major_(row_major), sign_(negate ? -1.f : 1.f), d_(d), k_(element_k(kind)) {}

  template <class Touch>  // every piece of 16 bytes of rows 0 .. rows - 1
  void pieces(int rows, Touch touch) const {
    if (!row_major_) {
      for (int r = 0; r < rows; ++r)  // K of one instruction is always 32 bytes of a row
        for (int j = 0; j < 2; ++j) touch(k_major_offset(d_, u32(r), u32(j)));
    } else {
      for (int k = 0; k < k_; ++k)
        for (int p = 0; p < rows / per_piece(); ++p) touch(row_major_offset(d_, u32(p), u32(k)));
    }
  }

  void read(u8 const* shared, int rows, float* out, int stride) const {  // out[k * stride + row]
    if (!row_major_) {
      for (int r = 0; r < rows; ++r) {
        float values[64];
        for (int j = 0; j < 2; ++j) unpack(shared + k_major_offset(d_, u32(r), u32(j)), values + j * (k_ / 2), k_ / 2);
        for (int k = 0; k < k_; ++k) out[k * stride + r] = values[k];
      }
      return;
    }
    int const each = per_piece();
    for (int k = 0; k < k_; ++k)
      for (int p = 0; p < rows / each; ++p)
        unpack(shared + row_major_offset(d_, u32(p), u32(k)), out + k * stride + p * each, each);
  }

 private:
  int per_piece() const { return kind_ == MultiplyKind::kF16 ? 8 : kind_ == MultiplyKind::kTF32 ? 4 : 16; }

  void unpack(u8 const* p, float* out, int count) const {
    if (kind_ == MultiplyKind::kF16) {
      for (int i = 0; i < count; ++i) {
        u16 bits;
        memcpy(&bits, p + 2 * i, 2);
        out[i] = sign_ * (format_ ? bf16_to_float(bits) : f16_to_float(bits));
      }
    } else if (kind_ == MultiplyKind::kTF32) {
      for (int i = 0; i < count; ++i) {
        u32 bits;
        memcpy(&bits, p + 4 * i, 4);
        out[i] = sign_ * bit_cast<float>(bits & ~0x1fffu);
      }
    } else if (fp4_only(kind_)) {
      for (int i = 0; i < count; ++i) out[i] = sign_ * table(5)[p[i / 2] >> (i & 1) * 4 & 15];
    } else {  // 4 and 6 bits: 16 elements at the beginning of 16 bytes
      float const* t = table(format_);
      int const bits = format_ < 2 ? 8 : format_ == 5 ? 4 : 6;
      for (int i = 0; i < count; ++i) {
        u32 two;
        if (bits == 8)
          two = p[i];
        else {
          u16 pair;
          memcpy(&pair, p + i * bits / 8, 2);
          two = pair >> i * bits % 8 & ((1 << bits) - 1);
        }
        out[i] = sign_ * t[two];
      }
    }
  }

  static float const* table(int format) {
    struct Tables {
      float values[6][256];
      Tables() {
        Format const formats[] = {kE4M3, kE5M2, kE4M3, kE2M3, kE3M2, kE2M1};
        for (int f = 0; f < 6; ++f)
          for (u32 i = 0; i < 256; ++i) values[f][i] = decode(formats[f], i);
      }
    };
    static Tables const tables;
    return tables.values[format];
  }

  MultiplyKind kind_;
  int format_;
  bool row_major_;
  float sign_;
  MatrixDescriptor d_;
  int k_;
};

struct Work {
  Multiply x;
  Instruction i;
  MatrixOperand a, b;
};

float scale_value(bool e8m0, u8 code) {
  if (!e8m0) return decode(kE4M3, code & 0x7f);
  return code == 255 ? NAN : code == 0 ? 0x1p-127f : bit_cast<float>(u32(code) << 23);
}

constexpr int kRowBlock = 4, kColumnBlock = 64;  // of a product that stays in the host's registers

int round_up(int x, int multiple) { return (x + multiple - 1) / multiple * multiple; }

// out[i][j] = sum over k of a[k][i] * b[k][j]. The products are exact in FP32; the sums round in this order.
void multiply_block(float const* a, int a_stride, float const* b, int b_stride, int k, float* out, int out_stride) {
  float sum[kRowBlock][kColumnBlock] = {};
  for (int kk = 0; kk < k; ++kk) {
    for (int i = 0; i < kRowBlock; ++i)
      for (int j = 0; j < kColumnBlock; ++j)
        sum[i][j] = std::fma(a[kk * a_stride + i], b[kk * b_stride + j], sum[i][j]);
  }
  for (int i = 0; i < kRowBlock; ++i) memcpy(out + i * out_stride, sum[i], sizeof sum[i]);
}

void accumulate(float* d, float const* t, float scale, float const* scales, int n, bool keep) {
  if (scales) {
    for (int j = 0; j < n; ++j) {
      // The exponents of the scale factors add: one of 2^127 beside one of 2^-20 is no overflow.
      float const v = float(double(t[j]) * (double(scale) * scales[j]));
      d[j] = keep ? d[j] + v : v;
    }
  } else {
    for (int j = 0; j < n; ++j) d[j] = keep ? d[j] + t[j] : t[j];
  }
}

void compute(Cluster& cluster, Work const& w) {
  Multiply const& x = w.x;
  int const k = element_k(x.kind), n = w.i.n, ctas = x.ctas, rows = w.i.m / ctas, columns = n / ctas,
            padded = round_up(n, kColumnBlock);
  u32 const pair = ctas == 2 ? x.rank & ~1u : x.rank;
  thread_local std::vector<float> b, a, sums, scales;
  b.assign(size_t(k) * padded, 0.f);
  a.resize(size_t(k) * rows);
  sums.resize(size_t(rows) * padded);
  for (int h = 0; h < ctas; ++h)
    w.b.read(cluster.ctas[pair + h]->shared.data(), columns, b.data() + h * columns, padded);
  bool const block_scaled = scaled(x.kind);
  int const vectors = block_scaled ? x.scale_vector : 1, step = k / vectors;
  scales.resize(n);
  for (int h = 0; h < ctas; ++h) {
    Cta& cta = *cluster.ctas[pair + h];
    u32* cells = cta.tensor.cells.data();
    w.a.read(cta.shared.data(), rows, a.data(), rows);
    for (int v = 0; v < vectors; ++v) {
      for (int m = 0; m < rows; m += kRowBlock)
        for (int j = 0; j < padded; j += kColumnBlock)
          multiply_block(&a[size_t(v) * step * rows + m], rows, &b[size_t(v) * step * padded + j], padded, step,
                         &sums[size_t(m) * padded + j], padded);
      for (int j = 0; block_scaled && j < n; ++j) {
        u32 const word = cells[(j % 32) * kTensorColumns + (x.scale_b & 0x1ff) + j / 32];
        scales[j] = scale_value(w.i.e8m0, u8(word >> 8 * ((w.i.scale_id_b + v) & 3)));
      }
      for (int m = 0; m < rows; ++m) {
        // M = 64 of a CTA: alone, in the first half of each quarter of the lanes; of a pair, columns in two halves, one
        // below the other
        bool const halves = rows == 64 && ctas == 2;
        int const lane = rows == 64 && ctas == 1 ? m / 16 * 32 + m % 16 : m, width = halves ? n / 2 : n;
        u32 const word = block_scaled ? cells[(m % 32) * kTensorColumns + (x.scale_a & 0x1ff) + m / 32] : 0;
        float const scale = block_scaled ? scale_value(w.i.e8m0, u8(word >> 8 * ((w.i.scale_id_a + v) & 3))) : 1.f;
        for (int half = 0; half < (halves ? 2 : 1); ++half) {
          int const l = lane + half * 64;
          if (x.disabled_lanes[l / 32] >> l % 32 & 1) continue;
          float* d = reinterpret_cast<float*>(&cells[l * kTensorColumns + (x.d & 0x1ff)]);
          accumulate(d, &sums[size_t(m) * padded] + half * width, scale,
                     block_scaled ? scales.data() + half * width : nullptr, width, x.accumulate || v > 0);
        }
      }
    }
  }
}

}  // namespace

std::function<void()> prepare_multiply(Context& c, Multiply const& x) {
  Instruction const i = parse_instruction(x);
  Cluster& cluster = c.cluster;
  if (x.ctas == 2 && cluster.ctas.size() % 2)
    fail("launch", "a CTA pair in a cluster of %zu CTAs", cluster.ctas.size());
  auto work =
      std::make_shared<Work>(Work{x, i, MatrixOperand(x.kind, i.format_a, i.rows_a, i.negate_a, parse_descriptor(x.a)),
                                  MatrixOperand(x.kind, i.format_b, i.rows_b, i.negate_b, parse_descriptor(x.b))});
  int const rows = i.m / x.ctas, columns = i.n / x.ctas;
  u32 const pair = x.ctas == 2 ? x.rank & ~1u : x.rank;
  Cta& issuer = *cluster.ctas[x.rank];
  Stamp const stamp(issuer.tensor_agent, issuer.tensor_epoch);
  bool const halves = rows == 64 && x.ctas == 2;
  u32 const width = u32(halves ? i.n / 2 : i.n);
  u32 const blocks = rows == 64 && x.ctas == 1 ? 0x55 : 0xff;
  if (x.d >> 16) fail("tensor_memory", "accumulators at lane %u of tensor memory", x.d >> 16);
  for (int h = 0; h < x.ctas; ++h) {
    Cta& cta = cluster.owner((pair + h) << kRankShift | kReservedShared, 1, "a matrix multiplication");
    auto touch = [&](u32 offset) {
      cluster.owner(cta.rank << kRankShift | offset, 16, "a matrix operand");
      cta.shadow.async_read(cluster, c.warp, cta.rank, offset, 16, stamp);
    };
    work->a.pieces(rows, touch);
    work->b.pieces(columns, touch);
    if (cta.tensor.cells.empty())
      fail("tensor_memory", "a matrix multiplication into tensor memory of CTA %u, which allocated none", cta.rank);
    if (scaled(x.kind)) {
      cta.tensor.read(cluster, c.warp, cta.rank, x.scale_a & 0x1ff, u32(rows + 31) / 32, 3, stamp, true,
                      "a matrix multiplication's scale factors of A");
      cta.tensor.read(cluster, c.warp, cta.rank, x.scale_b & 0x1ff, u32(i.n + 31) / 32, 3, stamp, true,
                      "a matrix multiplication's scale factors of B");
    }
    check_loads_finished(cta, x.d & 0xffff, width, blocks);
    if (x.accumulate)
      cta.tensor.read(cluster, c.warp, cta.rank, x.d & 0xffff, width, blocks, stamp, true,
                      "an accumulating matrix multiplication");
    cta.tensor.write(cluster, c.warp, cta.rank, x.d & 0xffff, width, blocks, stamp, true, "a matrix multiplication");
  }
  Traffic& traffic = c.machine.traffic;
  ++traffic.multiplications;
  // Dense peak of one SM: 4096 multiply-adds of 16 bits a cycle, twice that of 8, four times that of 4. Both CTAs work
  // at once.
  double const rate = x.kind == MultiplyKind::kTF32  ? 2048
                      : x.kind == MultiplyKind::kF16 ? 4096
                      : fp4_only(x.kind)             ? 16384
                                                     : 8192;
  traffic.multiply_cycles += x.ctas * (double(rows) * i.n * element_k(x.kind) / rate);
  return [&cluster, work] { compute(cluster, *work); };
}

}  // namespace simulator
