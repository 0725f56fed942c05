// y = the sum of parts over its first axis, in the order of the splits.
//
// parts float32 [splits, n] · dims [n, splits] → y [n]
// T: type of y. grid.x: one thread for every sum.
const uint32_t n = dims[0], splits = dims[1], i = thread_position_in_grid.x;
if (i < n) {
  float sum = 0.0f;
  for (uint32_t s = 0; s < splits; ++s) sum += parts[s * n + i];
  y[i] = static_cast<T>(sum);
}
