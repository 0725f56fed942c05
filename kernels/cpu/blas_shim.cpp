// blas_shim
