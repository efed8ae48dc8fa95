#pragma once

// Of device functions in headers: internal to the file that includes them.
#define CG_DEVICE static __device__ __forceinline__
