// dequantize: packed codes and their scales to values, 32 rows by 128 columns of them at a time.

#include "common/scale.h"
#include "cpu/device/bytes.h"
#include "cpu/kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace zerofp4::cpu::ZEROFP4_ISA {
namespace {

constexpr int kRowBlocks = kValueColumns / kBlock;
constexpr int kPackedRow = kValueColumns / 2;
constexpr int kPackedColumn = kValueRows / 2;
constexpr int64_t kUnitGrain = 8;  // units (4096 elements) that are worth a thread

using Codes = uint8_t[kValueColumns];  // a byte each
using Factors = float[kValueColumns];

struct Piece {
    int64_t row, col;    // of its first element
    int64_t rows, cols;  // what lies inside the matrix
};

// Values of 16 codes.
ZEROFP4_HD void look_up(const uint8_t* code, float (&value)[16]) {
#if defined(__AVX512F__)
    // With masks of all ones: the forms without one draw false warnings from GCC 12.
    const __m512 table = _mm512_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(code));
    const __m512i codes = _mm512_maskz_cvtepu8_epi32(0xffff, bytes);
    _mm512_storeu_ps(value, _mm512_maskz_permutexvar_ps(0xffff, codes, table));
#elif defined(__AVX2__)
    const __m256 table = _mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6);
    for (int i = 0; i < 16; i += 8) {
        const __m256i codes =
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(code + i)));
        const __m256 magnitudes = _mm256_permutevar8x32_ps(table, codes);  // by the lowest three bits
        const __m256i signs = _mm256_slli_epi32(_mm256_srli_epi32(codes, 3), 31);
        _mm256_storeu_ps(value + i, _mm256_or_ps(magnitudes, _mm256_castsi256_ps(signs)));
    }
#else
    for (int i = 0; i < 16; ++i) value[i] = e2m1_to_float(code[i]);
#endif
}

template <class T>
ZEROFP4_HD void store_values(const float (&value)[16], T* out) {
    for (int i = 0; i < 16; ++i) store_float(value[i], out[i]);
}

#if defined(__AVX512F__)
ZEROFP4_HD void store_values(const float (&value)[16], Float16* out) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const __m256i bits = _mm512_maskz_cvtps_ph(0xffff, _mm512_loadu_ps(value), kNearest);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bits);
}
#endif

// `count` elements of a row, at most 128, of which all are given.
template <class T>
ZEROFP4_HD void store_row(const Codes& codes, const Factors& factors, int64_t count, T* out) {
    T buffer[kValueColumns];
    T* to = count == kValueColumns ? out : buffer;
    for (int begin = 0; begin < kValueColumns; begin += 16) {
        float value[16];
        look_up(codes + begin, value);
        for (int i = 0; i < 16; ++i) value[i] *= factors[begin + i];
        store_values(value, to + begin);
    }
    if (to == buffer) std::memcpy(out, buffer, static_cast<size_t>(count) * sizeof(T));
}

// 64 bytes to codes.
ZEROFP4_HD void unpack(const uint8_t* packed, Codes& codes) {
    for (int i = 0; i < kPackedRow; i += 16) {
        Bytes16 both, low, high;
        std::memcpy(&both, packed + i, 16);
        interleave(both & 15, both >> 4, low, high);
        std::memcpy(codes + 2 * i, &low, 16);
        std::memcpy(codes + 2 * i + 16, &high, 16);
    }
}

// Factors of 128 elements of a row of the stored matrix.
ZEROFP4_HD void row_factors(const DequantizeDescriptor& item, int64_t row, const Piece& piece,
                            Factors& factors) {
    uint8_t bytes[kRowBlocks] = {};
    const int64_t blocks = ceil_div(piece.cols, kBlock);
    for (int64_t b = 0; b < blocks; ++b)
        bytes[b] = item.scale[item.scale_offset(row, piece.col / kBlock + b)];
    float block[kRowBlocks];
    for (int b = 0; b < kRowBlocks; ++b) block[b] = block_decode_by(bytes[b], *item.amax, item.factor());
    for (int b = 0; b < kRowBlocks; ++b) {
        for (int i = 0; i < kBlock; ++i) factors[b * kBlock + i] = block[b];
    }
}

template <class T>
void decode_rows(const DequantizeDescriptor& item, const Piece& piece) {
    Factors factors;
    for (int64_t row = piece.row; row < piece.row + piece.rows; ++row) {
        const bool new_scales = item.scale_shift == 0 || row % kBlock == 0;
        if (new_scales) row_factors(item, row, piece, factors);
        const uint8_t* packed = item.data + (row * item.cols + piece.col) / 2;
        uint8_t buffer[kPackedRow] = {};
        if (piece.cols < kValueColumns) {
            std::memcpy(buffer, packed, static_cast<size_t>(piece.cols / 2));
            packed = buffer;
        }
        Codes codes;
        unpack(packed, codes);
        store_row(codes, factors, piece.cols, static_cast<T*>(item.output) + row * item.cols + piece.col);
    }
}

// Of a column of 16 rows, in the piece's columns.
ZEROFP4_HD void column_factors(const DequantizeDescriptor& item, int64_t row, const Piece& piece,
                               Factors& factors) {
    uint8_t bytes[kValueColumns] = {};
    for (int64_t i = 0; i < piece.cols; ++i)
        bytes[i] = item.scale[item.scale_offset(piece.col + i, row / kBlock)];
    for (int i = 0; i < kValueColumns; ++i) factors[i] = block_decode_by(bytes[i], *item.amax, item.factor());
}

// The piece's bytes of the stored matrix, which has its columns as rows, transposed: [pair of rows][column].
ZEROFP4_HD void load_columns(const DequantizeDescriptor& item, const Piece& piece,
                             uint8_t (&pairs)[2][kPackedColumn][64]) {
    int64_t stride = item.rows / 2;
    const uint8_t* in = item.data + piece.col * stride + piece.row / 2;
    uint8_t buffer[kValueColumns][kPackedColumn];
    if (piece.cols < kValueColumns || piece.rows < kValueRows) {
        std::memset(buffer, 0, sizeof buffer);
        for (int64_t i = 0; i < piece.cols; ++i) {
            copy_short<kPackedColumn>(buffer[i], in + i * stride, piece.rows / 2);
        }
        in = buffer[0], stride = kPackedColumn;
    }
    transpose_64x16(in, stride, pairs[0]);
    transpose_64x16(in + 64 * stride, stride, pairs[1]);
}

template <class T>
void decode_columns(const DequantizeDescriptor& item, const Piece& piece) {
    uint8_t pairs[2][kPackedColumn][64];
    load_columns(item, piece, pairs);
    Factors factors;
    for (int64_t i = 0; i < piece.rows; ++i) {
        if (i % kBlock == 0) column_factors(item, piece.row + i, piece, factors);
        const int shift = i % 2 != 0 ? 4 : 0;
        Codes codes;
        for (int half = 0; half < 2; ++half) {
            for (int k = 0; k < 64; ++k) codes[64 * half + k] = pairs[half][i / 2][k] >> shift & 15;
        }
        T* out = static_cast<T*>(item.output) + (piece.row + i) * item.cols + piece.col;
        store_row(codes, factors, piece.cols, out);
    }
}

template <class T>
void decode_units(const DequantizeDescriptor& item, int64_t begin, int64_t end) {
    const int64_t across = ceil_div(item.cols, kValueColumns);
    for (int64_t unit = begin; unit < end; ++unit) {
        const int64_t row = unit / across * kValueRows, col = unit % across * kValueColumns;
        const Piece piece{row, col, least(kValueRows, item.rows - row),
                          least(kValueColumns, item.cols - col)};
        item.columnwise ? decode_columns<T>(item, piece) : decode_rows<T>(item, piece);
    }
}

}  // namespace

void dequantize(const DequantizeTable& table, DType dtype, int threads) {
    parallel_items(table.items, table.count, &DequantizeDescriptor::unit_begin, table.units, threads,
                   kUnitGrain, [dtype](const DequantizeDescriptor& item, int64_t begin, int64_t end) {
                       with_dtype(dtype, [&](auto t) { decode_units<decltype(t)>(item, begin, end); });
                   });
}

}  // namespace zerofp4::cpu::ZEROFP4_ISA
