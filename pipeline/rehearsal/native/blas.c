/* cuBLAS: a product is recorded with its sizes, its output and its first operand, and not computed. */
enum { REAL_32 = 0, REAL_64 = 1, COMPLEX_32 = 4, COMPLEX_64 = 5 };
int cublasCreate_v2(Handle **handle) { COUNT("cublasCreate_v2"); return (*handle = calloc(1, sizeof(Handle))) ? 0 : 3; }
int cublasDestroy_v2(Handle *handle) { COUNT("cublasDestroy_v2"); free(handle); return 0; }
int cublasSetStream_v2(Handle *handle, uint64_t stream) { COUNT("cublasSetStream_v2"); return handle->stream = stream, 0; }
int cublasSetMathMode(Handle *handle, int mode) { COUNT("cublasSetMathMode"); return handle->math_mode = mode, 0; }
int cublasGetMathMode(Handle *handle, int *mode) { COUNT("cublasGetMathMode"); return *mode = handle->math_mode, 0; }
int cublasSetPointerMode_v2(Handle *handle, int mode) { COUNT("cublasSetPointerMode_v2"); return handle->pointer_mode = mode, 0; }
int cublasGetPointerMode_v2(Handle *handle, int *mode) { COUNT("cublasGetPointerMode_v2"); return *mode = handle->pointer_mode, 0; }
NOTHING(cublasSetWorkspace_v2)
NOTHING(cublasSetSmCountTarget)

static int product(Call *call, uint64_t stream, int m, int n, int k, int batch, int type, const void *a, void *c) {
    append(call, PRODUCT, (void *)stream, (Entry){.object = (uint64_t)c, .source = (uint64_t)a, .size = type, .x = m, .y = n, .z = k, .w = batch});
    return 0;
}
typedef const void *In;
#define GEMM(letter, type) \
    int cublas##letter##gemm_v2(Handle *h, int ta, int tb, int m, int n, int k, In x, In a, int la, In b, int lb, In y, void *c, int lc) { \
        COUNT("cublas" #letter "gemm_v2"); \
        (void)ta, (void)tb, (void)x, (void)la, (void)b, (void)lb, (void)y, (void)lc; \
        return product(&call, h->stream, m, n, k, 1, type, a, c); \
    } \
    int cublas##letter##gemmStridedBatched(Handle *h, int ta, int tb, int m, int n, int k, In x, In a, int la, long sa, In b, int lb, long sb, In y, \
                                           void *c, int lc, long sc, int batch) { \
        COUNT("cublas" #letter "gemmStridedBatched"); \
        (void)ta, (void)tb, (void)x, (void)la, (void)sa, (void)b, (void)lb, (void)sb, (void)y, (void)lc, (void)sc; \
        return product(&call, h->stream, m, n, k, batch, type, a, c); \
    } \
    int cublas##letter##gemmBatched(Handle *h, int ta, int tb, int m, int n, int k, In x, In a, int la, In b, int lb, In y, void *c, int lc, int batch) { \
        COUNT("cublas" #letter "gemmBatched"); \
        (void)ta, (void)tb, (void)x, (void)a, (void)la, (void)b, (void)lb, (void)y, (void)c, (void)lc; \
        return product(&call, h->stream, m, n, k, batch, type, NULL, NULL); /* its addresses are on the device */ \
    } \
    int cublas##letter##gemv_v2(Handle *h, int t, int m, int n, In x, In a, int la, In b, int ib, In y, void *c, int ic) { \
        COUNT("cublas" #letter "gemv_v2"); \
        (void)x, (void)la, (void)b, (void)ib, (void)y, (void)ic; \
        return product(&call, h->stream, t ? n : m, 1, t ? m : n, 1, type, a, c); \
    }
GEMM(S, REAL_32)
GEMM(D, REAL_64)
GEMM(C, COMPLEX_32)
GEMM(Z, COMPLEX_64)
int cublasGemmEx(Handle *h, int ta, int tb, int m, int n, int k, In x, In a, int type, int la, In b, int type_b, int lb, In y, void *c) {
    COUNT("cublasGemmEx");
    (void)ta, (void)tb, (void)x, (void)la, (void)b, (void)type_b, (void)lb, (void)y;
    return product(&call, h->stream, m, n, k, 1, type, a, c);
}
int cublasSgemmEx(Handle *h, int ta, int tb, int m, int n, int k, In x, In a, int type, int la, In b, int type_b, int lb, In y, void *c) {
    COUNT("cublasSgemmEx");
    (void)ta, (void)tb, (void)x, (void)la, (void)b, (void)type_b, (void)lb, (void)y;
    return product(&call, h->stream, m, n, k, 1, type, a, c);
}
int cublasGemmStridedBatchedEx(Handle *h, int ta, int tb, int m, int n, int k, In x, In a, int type, int la, long sa, In b, int type_b, int lb,
                               long sb, In y, void *c, int type_c, int lc, long sc, int batch) {
    COUNT("cublasGemmStridedBatchedEx");
    (void)ta, (void)tb, (void)x, (void)la, (void)sa, (void)b, (void)type_b, (void)lb, (void)sb, (void)y, (void)type_c, (void)lc, (void)sc;
    return product(&call, h->stream, m, n, k, batch, type, a, c);
}
#define DOT(name, result_type) \
    int name(Handle *h, int n, In a, int ia, In b, int ib, void *result) { \
        COUNT(#name); \
        (void)ia, (void)b, (void)ib; \
        if (h->pointer_mode == 0) *(result_type *)result = 0; /* else it is on the device */ \
        return product(&call, h->stream, 1, 1, n, 1, sizeof(result_type) == 4 ? REAL_32 : REAL_64, a, result); \
    }
DOT(cublasSdot_v2, float)
DOT(cublasDdot_v2, double)

/* cuBLASLt */
typedef struct { int type; uint64_t rows, columns; int batch; } Layout;
typedef struct { int transposed_a, transposed_b; } Description;
size_t cublasLtGetVersion(void) { COUNT("cublasLtGetVersion"); return 10 * CUDA_VERSION; }
int cublasLtMatrixLayoutCreate(Layout **layout, int type, uint64_t rows, uint64_t columns, int64_t leading) {
    COUNT("cublasLtMatrixLayoutCreate");
    (void)leading;
    if (!(*layout = malloc(sizeof(Layout)))) return 3;
    return **layout = (Layout){type, rows, columns, 1}, 0;
}
int cublasLtMatrixLayoutSetAttribute(Layout *layout, int kind, const void *value, size_t size) {
    COUNT("cublasLtMatrixLayoutSetAttribute");
    if (kind == 5 && size == sizeof(int)) layout->batch = *(const int *)value;
    return 0;
}
int cublasLtMatrixLayoutDestroy(Layout *layout) { COUNT("cublasLtMatrixLayoutDestroy"); free(layout); return 0; }
int cublasLtMatmulDescCreate(Description **description) { COUNT("cublasLtMatmulDescCreate"); return (*description = calloc(1, sizeof(Description))) ? 0 : 3; }
int cublasLtMatmulDescSetAttribute(Description *description, int kind, const void *value, size_t size) {
    COUNT("cublasLtMatmulDescSetAttribute");
    if (kind == 3 && size == sizeof(int)) description->transposed_a = *(const int *)value;
    if (kind == 4 && size == sizeof(int)) description->transposed_b = *(const int *)value;
    return 0;
}
int cublasLtMatmulDescDestroy(Description *description) { COUNT("cublasLtMatmulDescDestroy"); free(description); return 0; }
int cublasLtMatmulPreferenceCreate(void **preference) { COUNT("cublasLtMatmulPreferenceCreate"); return *preference = (void *)16, 0; }
NOTHING(cublasLtMatmulPreferenceSetAttribute)
NOTHING(cublasLtMatmulPreferenceDestroy)
typedef struct { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; } Heuristic;
int cublasLtMatmulAlgoGetHeuristic(In h, In d, In a, In b, In c, In e, In f, int wanted, Heuristic *found, int *count) {
    COUNT("cublasLtMatmulAlgoGetHeuristic");
    (void)h, (void)d, (void)a, (void)b, (void)c, (void)e, (void)f, (void)wanted;
    return *found = (Heuristic){.waves = 1}, *count = 1, 0;
}
int cublasLtMatmul(In h, const Description *description, In x, In a, const Layout *la, In b, In lb, In y, In c, In lc, void *d, const Layout *ld,
                   In algorithm, void *workspace, size_t workspace_bytes, uint64_t stream) {
    COUNT("cublasLtMatmul");
    (void)h, (void)x, (void)b, (void)lb, (void)y, (void)c, (void)lc, (void)algorithm, (void)workspace, (void)workspace_bytes;
    int k = description->transposed_a ? la->rows : la->columns;
    return product(&call, stream, ld->rows, ld->columns, k, ld->batch, la->type, a, d);
}
