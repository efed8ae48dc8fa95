// A stand-in for the CUDA runtime. A kernel library's host code links against this in libcudart's place, so that the
// launcher that ships is the launcher that runs. Device memory is host memory, streams are in order, and a launch is
// over when the call returns. A failed check gives cudaErrorLaunchFailure, and the session keeps its text.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "session.h"
#include "tensor_map.h"

using namespace simulator;

namespace {

// A source file's PTX, read when one of its kernels is first asked for: an engine has many that a test does not launch.
struct FatBinary {
  u8 const* data;
  bool read = false;
  std::vector<std::shared_ptr<Module>> modules;
  std::string failure;  // why the PTX was not understood
};
struct Registry {
  struct Function {
    LoadedKernel kernel;
    void** binary;
  };
  std::map<void const*, Function> functions;  // by host function
  std::map<void**, FatBinary> binaries;
};
Registry& registry() {
  static Registry r;
  return r;
}

cudaError_t result(cudaError_t e) {
  if (e != cudaSuccess && active()) active()->last_error = e;
  return e;
}

// ---- fat binaries: a header, then entries, each a header and text

struct FatWrapper {
  int magic, version;
  u8 const* data;
  void* unused;
};
struct FatEntry {
  u16 kind, version;
  u32 header_bytes;
  u64 bytes;
  u32 compressed_bytes, unknown0, minor_major, architecture;
  u32 name_offset, name_bytes;
  u64 flags;
};
constexpr u16 kPtx = 1;
constexpr u64 kCompressed = 0x2000 | 0x8000;

std::vector<std::shared_ptr<Module>> read_fat_binary(u8 const* data) {
  std::vector<std::shared_ptr<Module>> modules;
  u32 magic;
  u16 header;
  u64 bytes;
  memcpy(&magic, data, 4);
  memcpy(&header, data + 6, 2);
  memcpy(&bytes, data + 8, 8);
  if (magic != 0xba55ed50) fail("ptx", "a fat binary begins with %#x", magic);
  for (u8 const *p = data + header, *end = p + bytes; p < end;) {
    FatEntry e;
    memcpy(&e, p, sizeof e);
    if (e.kind == kPtx) {
      if (e.flags & kCompressed) fail("ptx", "the PTX is compressed: compile with --no-compress");
      modules.push_back(
          std::make_shared<Module>(parse_ptx(std::string(reinterpret_cast<char const*>(p) + e.header_bytes, e.bytes))));
    }
    p += e.header_bytes + e.bytes;
  }
  return modules;
}

template <class F>
cudaError_t guarded(F work) {
  Session* s = active();
  if (!s) return result(cudaErrorNoDevice);
  if (!s->category.empty()) return result(cudaErrorLaunchFailure);  // as on a GPU, the first failure is final
  try {
    work(*s);
    return cudaSuccess;
  } catch (Failure const& f) {
    s->category = f.category;
    s->text = f.what();
  } catch (std::exception const& e) {
    s->category = "internal";
    s->text = e.what();
  }
  return result(cudaErrorLaunchFailure);
}

LoadedKernel& find_kernel(void const* function) {
  Failure const unknown("launch", "a launch of a function that no library registered as a kernel");
  auto found = registry().functions.find(function);
  if (found == registry().functions.end()) throw unknown;
  auto& [kernel, handle] = found->second;
  if (kernel.module) return kernel;
  FatBinary& binary = registry().binaries[handle];
  if (!binary.read) {
    binary.read = true;
    try {
      binary.modules = read_fat_binary(binary.data);
    } catch (std::exception const& e) {
      binary.failure = e.what();
    }
  }
  if (!binary.failure.empty()) throw Failure("ptx", binary.failure);
  for (auto const& module : binary.modules)
    for (Kernel const& k : module->kernels)
      if (k.name == kernel.name) kernel.module = module;
  if (!kernel.module) throw unknown;
  return kernel;
}

cudaError_t launch(void const* function, dim3 grid, dim3 block, dim3 cluster, size_t shared, void** arguments) {
  return guarded([&](Session& s) {
    s.launch(find_kernel(function), {grid.x, grid.y, grid.z}, {block.x, block.y, block.z},
             {cluster.x, cluster.y, cluster.z}, shared, arguments);
  });
}

struct CallConfiguration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<CallConfiguration> configurations;

CUresult encode_tiled(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* base,
                      cuuint64_t const* dimension, cuuint64_t const* stride, cuuint32_t const* box,
                      cuuint32_t const* element_stride, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  TensorMap map{};
  map.magic = TensorMap::kMagic;
  map.element = Element(type);
  map.rank = u8(std::min(rank, 255u));
  map.swizzle = u8(swizzle);
  map.interleave = u8(interleave);
  map.nan_fill = fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  map.base = u64(base);
  for (u32 i = 0; i < rank && i < 5; ++i) {
    map.dimension[i] = dimension[i];
    map.box[i] = u16(std::min(box[i], 65535u));
    map.element_stride[i] = u8(std::min(element_stride[i], 255u));
    if (i) map.stride[i - 1] = stride[i - 1];
  }
  if (std::string const problem = map.problem(); !problem.empty()) {
    if (Session* s = active(); s && s->text.empty()) s->map_problem = problem;
    return CUDA_ERROR_INVALID_VALUE;
  }
  memcpy(out, &map, sizeof map);
  return CUDA_SUCCESS;
}

int attribute(cudaDeviceAttr a) {
  switch (a) {
    case cudaDevAttrMultiProcessorCount:
      return active() ? int(active()->machine.settings.sms) : 1;
    case cudaDevAttrComputeCapabilityMajor:
      return 10;
    case cudaDevAttrComputeCapabilityMinor:
      return 0;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return int(kMaxShared);
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return 48 * 1024;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return 228 * 1024;
    case cudaDevAttrReservedSharedMemoryPerBlock:
      return int(kReservedShared);
    case cudaDevAttrMaxThreadsPerBlock:
      return 1024;
    case cudaDevAttrWarpSize:
      return kLanes;
    case cudaDevAttrMaxGridDimX:
      return INT32_MAX;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      return 65535;
    case cudaDevAttrL2CacheSize:
      return 126 << 20;
    case cudaDevAttrClusterLaunch:
      return 1;
    default:
      return 0;
  }
}

}  // namespace

extern "C" {

// ---- what nvcc's host code calls

void** __cudaRegisterFatBinary(void* wrapper) {
  void** handle = new void*[1]{wrapper};
  registry().binaries[handle] = {static_cast<FatWrapper*>(wrapper)->data};
  return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void** handle) {
  registry().binaries.erase(handle);
  delete[] handle;
}
void __cudaRegisterFunction(void** handle, char const* host, char*, char const* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  registry().functions[host] = {{name, nullptr}, handle};
}
void __cudaRegisterVar(void**, char*, char*, char const*, int, size_t, int, int) {}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, CUstream_st* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  CallConfiguration const c = configurations.back();
  configurations.pop_back();
  *grid = c.grid;
  *block = c.block;
  *shared = c.shared;
  *static_cast<cudaStream_t*>(stream) = c.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, void const* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t) {
  return launch(kernel, grid, block, dim3(1), shared, arguments);
}

// ---- launching

cudaError_t cudaLaunchKernel(void const* function, dim3 grid, dim3 block, void** arguments, size_t shared,
                             cudaStream_t) {
  return launch(function, grid, block, dim3(1), shared, arguments);
}
cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* config, void const* function, void** arguments) {
  dim3 cluster(1);
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      cluster =
          dim3(config->attrs[i].val.clusterDim.x, config->attrs[i].val.clusterDim.y, config->attrs[i].val.clusterDim.z);
  return launch(function, config->gridDim, config->blockDim, cluster, config->dynamicSmemBytes, arguments);
}
cudaError_t cudaFuncSetAttribute(void const* function, cudaFuncAttribute a, int value) {
  return guarded([&](Session& s) {
    KernelLimits& limits = s.limits[&find_kernel(function)];
    if (a == cudaFuncAttributeMaxDynamicSharedMemorySize) {
      if (value < 0 || value > int(kMaxShared))
        fail("launch", "cudaFuncAttributeMaxDynamicSharedMemorySize of %d: at most %u", value, kMaxShared);
      limits.dynamic_shared = u32(value);
    } else if (a == cudaFuncAttributeNonPortableClusterSizeAllowed) {
      limits.large_clusters = value;
    }
  });
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, void const*) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->maxDynamicSharedSizeBytes = int(kMaxShared);
  out->binaryVersion = out->ptxVersion = 100;
  return cudaSuccess;
}

// ---- the device

cudaError_t cudaGetDevice(int* device) { return *device = active() ? active()->number : 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  int current = 0;
  cudaGetDevice(&current);
  return result(device == current ? cudaSuccess : cudaErrorInvalidDevice);
}
cudaError_t cudaGetDeviceCount(int* count) { return cudaGetDevice(count), ++*count, cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr a, int) { return *value = attribute(a), cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "SM100 simulator");
  p->major = 10;
  p->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
  p->sharedMemPerBlockOptin = kMaxShared;
  p->sharedMemPerMultiprocessor = 228 * 1024;
  p->warpSize = kLanes;
  p->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  return active() && !active()->category.empty() ? result(cudaErrorLaunchFailure) : cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaDeviceSynchronize(); }
cudaError_t cudaPeekAtLastError() { return active() ? cudaError_t(active()->last_error) : cudaErrorNoDevice; }
cudaError_t cudaGetLastError() {
  cudaError_t const e = cudaPeekAtLastError();
  if (active()) active()->last_error = cudaSuccess;
  return e;
}
char const* cudaGetErrorString(cudaError_t e) {
  return e == cudaSuccess ? "no error" : e == cudaErrorLaunchFailure ? "a check of the simulator failed" : "CUDA error";
}
char const* cudaGetErrorName(cudaError_t e) { return cudaGetErrorString(e); }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, void const*, int, size_t, unsigned) {
  return *blocks = 1, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void const*, int, size_t) {
  return *blocks = 1, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void const*, cudaLaunchConfig_t const* config) {
  unsigned size = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
      size = config->attrs[i].val.clusterDim.x * config->attrs[i].val.clusterDim.y * config->attrs[i].val.clusterDim.z;
  return *clusters = int(attribute(cudaDevAttrMultiProcessorCount) / std::max(size, 1u)), cudaSuccess;
}

// ---- memory

cudaError_t cudaMalloc(void** p, size_t bytes) {
  if (!active()) return result(cudaErrorNoDevice);
  *p = active()->allocate(bytes);
  return result(*p ? cudaSuccess : cudaErrorMemoryAllocation);
}
cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) { return cudaMalloc(p, bytes); }
cudaError_t cudaFree(void* p) { return result(active() && active()->release(p) ? cudaSuccess : cudaErrorInvalidValue); }
cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
cudaError_t cudaMemcpy(void* to, void const* from, size_t bytes, cudaMemcpyKind kind) {
  return guarded([&](Session& s) {
    bool const to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice,
               from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (bytes && to_device) s.machine.memory.check(u64(to), bytes, true, "cudaMemcpy");
    if (bytes && from_device) s.machine.memory.check(u64(from), bytes, false, "cudaMemcpy");
    memmove(to, from, bytes);
  });
}
cudaError_t cudaMemcpyAsync(void* to, void const* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemset(void* p, int value, size_t bytes) {
  return guarded([&](Session& s) {
    if (bytes) memset(s.machine.memory.check(u64(p), bytes, true, "cudaMemset"), value, bytes);
  });
}
cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t) { return cudaMemset(p, value, bytes); }

// ---- the driver's tensor-map encoder

cudaError_t cudaGetDriverEntryPointByVersion(char const* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  bool const known = strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(encode_tiled) : nullptr;
  if (status) *status = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
CUresult cuTensorMapEncodeTiled(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* base,
                                cuuint64_t const* dimension, cuuint64_t const* stride, cuuint32_t const* box,
                                cuuint32_t const* element_stride, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  return encode_tiled(out, type, rank, base, dimension, stride, box, element_stride, interleave, swizzle, promotion,
                      fill);
}

}  // extern "C"
