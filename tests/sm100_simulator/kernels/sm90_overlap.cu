// What SM90 and SM100 share, one kernel a subject: recorded on a GPU by record_sm90.py and compared bit by bit.
// Scalar instructions. The kernels of memory and of clusters are in sm90_memory.cu.
#include <cuda_runtime.h>

#include "operation_list.h"

// Inputs: one word a thread. Outputs: a row of `stride` words an instruction.
__global__ void integers(uint32_t const* xs, uint32_t const* ys, uint32_t const* zs, uint32_t* out, int stride) {
  uint32_t const i = blockIdx.x * blockDim.x + threadIdx.x, x = xs[i], y = ys[i], z = zs[i];
  out += i;
  OPERATION("prmt.b32 %0, %1, %2, %3")
  OPERATION("shf.l.wrap.b32 %0, %1, %2, %3")
  OPERATION("shf.l.clamp.b32 %0, %1, %2, %3")
  OPERATION("shf.r.wrap.b32 %0, %1, %2, %3")
  OPERATION("shf.r.clamp.b32 %0, %1, %2, %3")
  OPERATION("shl.b32 %0, %1, %2")
  OPERATION("shr.u32 %0, %1, %2")
  OPERATION("shr.s32 %0, %1, %2")
  OPERATION("and.b32 t0, %3, 63; shr.s32 %0, %1, t0")
  OPERATION("lop3.b32 %0, %1, %2, %3, 0xe8")
  OPERATION("lop3.b32 %0, %1, %2, %3, 0x1b")
  OPERATION("lop3.b32 %0, %1, %2, %3, 0x96")
  OPERATION("min.s32 %0, %1, %2")
  OPERATION("max.s32 %0, %1, %2")
  OPERATION("min.u32 %0, %1, %2")
  OPERATION("max.u32 %0, %1, %2")
  OPERATION("abs.s32 %0, %1")
  OPERATION("neg.s32 %0, %1")
  OPERATION("mul.hi.s32 %0, %1, %2")
  OPERATION("mul.hi.u32 %0, %1, %2")
  OPERATION("mad.lo.s32 %0, %1, %2, %3")
  OPERATION("mad.hi.u32 %0, %1, %2, %3")
  OPERATION("mul.wide.s32 d0, %1, %2; mov.b64 {t0, t1}, d0; xor.b32 %0, t0, t1")
  OPERATION("cvt.u64.u32 d0, %3; mad.wide.u32 d0, %1, %2, d0; mov.b64 {t0, t1}, d0; xor.b32 %0, t0, t1")
  OPERATION("or.b32 t0, %2, 1; div.u32 %0, %1, t0")
  OPERATION("or.b32 t0, %2, 1; rem.u32 %0, %1, t0")
  OPERATION("and.b32 t0, %2, 0x7fff; or.b32 t0, t0, 2; div.s32 %0, %1, t0")
  OPERATION("and.b32 t0, %2, 0x7fff; or.b32 t0, t0, 2; rem.s32 %0, %1, t0")
  OPERATION("bfe.u32 %0, %1, %2, %3")
  OPERATION("bfe.s32 %0, %1, %2, %3")
  OPERATION("and.b32 t0, %3, 31; bfi.b32 %0, %1, %2, t0, 9")
  OPERATION("bfind.u32 %0, %1")
  OPERATION("bfind.s32 %0, %1")
  OPERATION("bfind.shiftamt.u32 %0, %1")
  OPERATION("brev.b32 %0, %1")
  OPERATION("clz.b32 %0, %1")
  OPERATION("popc.b32 %0, %1")
  OPERATION("cvt.sat.s8.s32 t0, %1; mov.b32 %0, t0")
  OPERATION("cvt.sat.u8.s32 t0, %1; mov.b32 %0, t0")
  OPERATION("cvt.sat.u16.s32 h0, %1; mov.b32 %0, {h0, 0}")
  OPERATION("cvt.s32.s8 %0, %1")
  OPERATION("cvt.u32.u8 %0, %1")
  OPERATION("cvt.s64.s32 d0, %1; shr.u64 d0, d0, 7; cvt.u32.u64 %0, d0")
  OPERATION("setp.lt.s32 p0, %1, %2; setp.hi.u32 p1, %1, %2; xor.pred p2, p0, p1; selp.b32 %0, %1, %3, p2")
}

__global__ void floats(uint32_t const* xs, uint32_t const* ys, uint32_t const* zs, uint32_t* out, int stride) {
  uint32_t const i = blockIdx.x * blockDim.x + threadIdx.x, x = xs[i], y = ys[i], z = zs[i];
  out += i;
  OPERATION("add.rn.f32 %0, %1, %2")
  OPERATION("add.rz.f32 %0, %1, %2")
  OPERATION("add.rp.f32 %0, %1, %2")
  OPERATION("sub.rm.f32 %0, %1, %2")
  OPERATION("add.ftz.f32 %0, %1, %2")
  OPERATION("add.sat.f32 %0, %1, %2")
  OPERATION("mul.rn.f32 %0, %1, %2")
  OPERATION("mul.rz.f32 %0, %1, %2")
  OPERATION("fma.rn.f32 %0, %1, %2, %3")
  OPERATION("fma.rp.f32 %0, %1, %2, %3")
  OPERATION("fma.rn.ftz.f32 %0, %1, %2, %3")
  OPERATION("div.rn.f32 %0, %1, %2")
  OPERATION("rcp.rn.f32 %0, %1")
  OPERATION("sqrt.rn.f32 %0, %1")
  OPERATION("abs.f32 %0, %1")
  OPERATION("neg.f32 %0, %1")
  OPERATION("min.f32 %0, %1, %2")
  OPERATION("max.f32 %0, %1, %2")
  OPERATION("min.NaN.f32 %0, %1, %2")
  OPERATION("max.NaN.f32 %0, %1, %2")
  OPERATION("min.xorsign.abs.f32 %0, %1, %2")
  OPERATION("max.xorsign.abs.f32 %0, %1, %2")
  OPERATION("min.NaN.xorsign.abs.f32 %0, %1, %2")
  OPERATION("max.NaN.xorsign.abs.f32 %0, %1, %2")
  OPERATION("copysign.f32 %0, %1, %2")
  OPERATION("setp.lt.f32 p0, %1, %2; selp.b32 %0, 1, 0, p0")
  OPERATION("setp.ltu.f32 p0, %1, %2; selp.b32 %0, 1, 0, p0")
  OPERATION("setp.equ.f32 p0, %1, %2; selp.b32 %0, 1, 0, p0")
  OPERATION("setp.ne.f32 p0, %1, %2; selp.b32 %0, 1, 0, p0")
  OPERATION("setp.nan.f32 p0, %1, %2; selp.b32 %0, 1, 0, p0")
  OPERATION("setp.num.f32 p0, %1, %2; selp.b32 %0, 1, 0, p0")
  OPERATION("cvt.rn.satfinite.e4m3x2.f32 h0, %1, %2; mov.b32 %0, {h0, 0}")
  OPERATION("cvt.rn.satfinite.e5m2x2.f32 h0, %1, %2; mov.b32 %0, {h0, 0}")
  OPERATION("cvt.rn.satfinite.relu.e4m3x2.f32 h0, %1, %2; mov.b32 %0, {h0, 0}")
  OPERATION("cvt.rn.satfinite.e4m3x2.f16x2 h0, %3; mov.b32 %0, {h0, 0}")
  OPERATION("cvt.rn.satfinite.e5m2x2.f16x2 h0, %3; mov.b32 %0, {h0, 0}")
  OPERATION("mov.b32 {h0, h1}, %3; cvt.rn.f16x2.e4m3x2 %0, h0")
  OPERATION("mov.b32 {h0, h1}, %3; cvt.rn.f16x2.e5m2x2 %0, h1")
  OPERATION("cvt.rn.f16x2.f32 %0, %1, %2")
  OPERATION("cvt.rz.f16x2.f32 %0, %1, %2")
  OPERATION("cvt.rn.bf16x2.f32 %0, %1, %2")
  OPERATION("cvt.rz.bf16x2.f32 %0, %1, %2")
  OPERATION("cvt.rn.relu.bf16x2.f32 %0, %1, %2")
  OPERATION("cvt.rn.f16.f32 h0, %1; mov.b32 %0, {h0, 0}")
  OPERATION("cvt.rn.bf16.f32 h0, %1; mov.b32 %0, {h0, 0}")
  OPERATION("mov.b32 {h0, h1}, %3; cvt.f32.f16 %0, h0")
  OPERATION("mov.b32 {h0, h1}, %3; cvt.f32.bf16 %0, h1")
  OPERATION("cvt.rna.tf32.f32 %0, %1")
  OPERATION("cvt.rni.s32.f32 %0, %1")
  OPERATION("cvt.rzi.s32.f32 %0, %1")
  OPERATION("cvt.rmi.u32.f32 %0, %1")
  OPERATION("cvt.rpi.s32.f32 %0, %1")
  OPERATION("cvt.rzi.s64.f32 d0, %1; mov.b64 {t0, t1}, d0; xor.b32 %0, t0, t1")
  OPERATION("cvt.rni.f32.f32 %0, %1")
  OPERATION("cvt.rmi.f32.f32 %0, %1")
  OPERATION("cvt.sat.f32.f32 %0, %1")
  OPERATION("cvt.rn.f32.s32 %0, %1")
  OPERATION("cvt.rz.f32.u32 %0, %1")
  OPERATION("mov.b64 d0, {%1, %2}; cvt.rn.f32.u64 %0, d0")
  OPERATION("mov.b64 d0, {%1, %2}; cvt.rn.f32.f64 %0, d0")
  OPERATION("cvt.f64.f32 d0, %1; add.rn.f64 d0, d0, d0; mov.b64 {t0, t1}, d0; xor.b32 %0, t0, t1")
}

// Packed halves: both of a word, so that random words reach infinities, NaNs and denormals.
__global__ void halves(uint32_t const* xs, uint32_t const* ys, uint32_t const* zs, uint32_t* out, int stride) {
  uint32_t const i = blockIdx.x * blockDim.x + threadIdx.x, x = xs[i], y = ys[i], z = zs[i];
  out += i;
  OPERATION("add.rn.f16x2 %0, %1, %2")
  OPERATION("sub.rn.f16x2 %0, %1, %2")
  OPERATION("mul.rn.f16x2 %0, %1, %2")
  OPERATION("add.ftz.f16x2 %0, %1, %2")
  OPERATION("add.sat.f16x2 %0, %1, %2")
  OPERATION("fma.rn.f16x2 %0, %1, %2, %3")
  OPERATION("fma.rn.sat.f16x2 %0, %1, %2, %3")
  OPERATION("fma.rn.relu.f16x2 %0, %1, %2, %3")
  OPERATION("min.f16x2 %0, %1, %2")
  OPERATION("max.NaN.f16x2 %0, %1, %2")
  OPERATION("abs.f16x2 %0, %1")
  OPERATION("neg.f16x2 %0, %1")
  OPERATION("add.rn.bf16x2 %0, %1, %2")
  OPERATION("sub.rn.bf16x2 %0, %1, %2")
  OPERATION("mul.rn.bf16x2 %0, %1, %2")
  OPERATION("fma.rn.bf16x2 %0, %1, %2, %3")
  OPERATION("fma.rn.relu.bf16x2 %0, %1, %2, %3")
  OPERATION("min.NaN.bf16x2 %0, %1, %2")
  OPERATION("max.bf16x2 %0, %1, %2")
  OPERATION("abs.bf16x2 %0, %1")
  OPERATION("neg.bf16x2 %0, %1")
}

// Exchange within a warp. z holds lanes, segment masks and membership.
__global__ void lanes(uint32_t const* xs, uint32_t const* ys, uint32_t const* zs, uint32_t* out, int stride) {
  uint32_t const i = blockIdx.x * blockDim.x + threadIdx.x, x = xs[i], y = ys[i], z = zs[i];
  out += i;
  OPERATION("shfl.sync.up.b32 %0|p0, %1, 3, 0, 0xffffffff; @!p0 not.b32 %0, %0")
  OPERATION("shfl.sync.down.b32 %0|p0, %1, 5, 31, 0xffffffff; @!p0 not.b32 %0, %0")
  OPERATION("shfl.sync.bfly.b32 %0|p0, %1, 6, 31, 0xffffffff; @!p0 not.b32 %0, %0")
  OPERATION("shfl.sync.idx.b32 %0|p0, %1, %3, 31, 0xffffffff; @!p0 not.b32 %0, %0")
  OPERATION("shfl.sync.up.b32 %0|p0, %1, 2, 0x1800, 0xffffffff; @!p0 not.b32 %0, %0")
  OPERATION("shfl.sync.down.b32 %0|p0, %1, 3, 0x181f, 0xffffffff; @!p0 not.b32 %0, %0")
  OPERATION("shfl.sync.bfly.b32 %0|p0, %1, 9, 0x181f, 0xffffffff; @!p0 not.b32 %0, %0")
  OPERATION("shfl.sync.idx.b32 %0|p0, %1, %3, 0x1c03, 0xffffffff; @!p0 not.b32 %0, %0")
  OPERATION("setp.lt.u32 p0, %1, %2; vote.sync.ballot.b32 %0, p0, 0xffffffff")
  OPERATION("setp.lt.u32 p0, %1, %2; vote.sync.any.pred p1, p0, 0xffffffff; selp.b32 %0, 1, 0, p1")
  OPERATION("setp.ne.u32 p0, %1, %2; vote.sync.all.pred p1, p0, 0xffffffff; selp.b32 %0, 1, 0, p1")
  OPERATION("setp.lt.u32 p0, %1, %2; vote.sync.uni.pred p1, !p0, 0xffffffff; selp.b32 %0, 1, 0, p1")
  OPERATION("redux.sync.add.s32 %0, %1, 0xffffffff")
  OPERATION("redux.sync.min.s32 %0, %1, 0xffffffff")
  OPERATION("redux.sync.max.s32 %0, %1, 0xffffffff")
  OPERATION("redux.sync.min.u32 %0, %1, 0xffffffff")
  OPERATION("redux.sync.max.u32 %0, %1, 0xffffffff")
  OPERATION("redux.sync.and.b32 %0, %1, 0xffffffff")
  OPERATION("redux.sync.or.b32 %0, %1, 0xffffffff")
  OPERATION("redux.sync.xor.b32 %0, %1, 0xffffffff")
  OPERATION("and.b32 t0, %1, 3; match.any.sync.b32 %0, t0, 0xffffffff")
  OPERATION("and.b32 t0, %1, 0; match.all.sync.b32 %0|p0, t0, 0xffffffff; @!p0 not.b32 %0, %0")
  OPERATION("elect.sync t0|p0, 0xffffffff; selp.b32 %0, t0, 99, p0")
  // Half of the warp has left: the rest exchanges under its own mask.
  if (threadIdx.x % 32 >= 20) return;
  OPERATION("shfl.sync.down.b32 %0|p0, %1, 4, 15, 0xfffff; @!p0 not.b32 %0, %0")
  OPERATION("redux.sync.add.u32 %0, %1, 0xfffff")
  OPERATION("setp.lt.u32 p0, %1, %2; vote.sync.ballot.b32 %0, p0, 0xfffff")
  OPERATION("elect.sync t0|p0, 0xfffff; selp.b32 %0, t0, 99, p0")
}

using Operations = void (*)(uint32_t const*, uint32_t const*, uint32_t const*, uint32_t*, int);

static int run(Operations kernel, uint32_t const* x, uint32_t const* y, uint32_t const* z, uint32_t* out, int count) {
  kernel<<<count / 64, 64>>>(x, y, z, out, count);
  return cudaGetLastError();
}

#define RUN(name)                                                                                            \
  extern "C" int run_##name(uint32_t const* x, uint32_t const* y, uint32_t const* z, uint32_t* out, int n) { \
    return run(name, x, y, z, out, n);                                                                       \
  }
RUN(integers)
RUN(floats)
RUN(halves)
RUN(lanes)
