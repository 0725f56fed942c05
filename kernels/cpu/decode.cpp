// decode
