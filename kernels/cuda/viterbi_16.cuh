#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(256, 1)
