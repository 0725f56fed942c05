// Four thread blocks a processor.
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__(128, 4)
