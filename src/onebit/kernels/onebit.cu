// The kernels of cuda.py; torch_ops.py defines what they compute. They are compiled at run time, once
// with REAL = float and once with double, without headers. Products and sums are not contracted into
// FMA, and subnormal numbers are kept.
//
// A team of LANES threads works on one block of the table: thread j is lane j of the sums and has
// elements j, j + LANES, ... A "row" is LANES neighbouring elements. A warp has half of each row,
// whose 32 signs are one word of a message.

using Int = long long;
using Word = unsigned int;

constexpr int LANES = 64;  // layout.ALIGNMENT
constexpr int WARP = 32;
constexpr int THREADS = 256;
constexpr int TEAMS = THREADS / LANES;
constexpr int ROW_ALIGNMENT = 16;  // bytes, as layout.ROW_ALIGNMENT
constexpr int DEPTH = 32 / sizeof(REAL);  // rows that are loaded at the same time
constexpr Word ALL = 0xffffffff;

// a row of the table of blocks, see layout.Column
struct Block { Int start, length, real, group, offset, piece, full; };

// what belongs to one tensor, written by cuda.py
struct Tensor { void* data; Int type; double numbers[8]; };

// ---- number formats. Rounding is to nearest, ties to even, and by way of float, as torch does it.

struct Half { unsigned short bits; };
struct Bfloat16 { unsigned short bits; };

inline double widen(double x) { return x; }
inline float widen(float x) { return x; }
inline float widen(Bfloat16 x) { return __uint_as_float(Word(x.bits) << 16); }

inline float widen(Half x)
{
    Word magnitude = Word(x.bits & 0x7fff) << 13, sign = Word(x.bits & 0x8000) << 16;
    if (magnitude >= 0x0f800000) return __uint_as_float(sign | 0x7f800000 | magnitude);  // infinity and NaN
    return __uint_as_float(sign | magnitude) * 0x1p112f;  // moves the exponent, exact even where it is 0
}

inline void narrow(double x, double& to) { to = x; }
inline void narrow(double x, float& to) { to = float(x); }

inline void narrow(float x, Bfloat16& to)
{
    Word bits = __float_as_uint(x);
    to.bits = x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

inline void narrow(float x, Half& to)
{
    Word bits = __float_as_uint(x), magnitude = bits & 0x7fffffff, half;
    if (magnitude > 0x7f800000) half = 0x7e00;                                                   // NaN
    else if (magnitude >= 0x47800000) half = 0x7c00;                                             // 2^16 and more
    else if (magnitude >= 0x38800000) half = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    else half = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000;                 // the sum's last bit is 2^-24
    to.bits = half | bits >> 16 & 0x8000;
}

// Calls function(pointer to the tensor's elements, in their own type), or with a float null pointer
// if there is no tensor.
template <class F>
inline void in_its_type(const Tensor& tensor, F function)
{
    __builtin_assume(__isGlobal(tensor.data));
    switch (tensor.type) {
    case 1: function(static_cast<float*>(tensor.data)); break;
    case 2: function(static_cast<double*>(tensor.data)); break;
    case 3: function(static_cast<Bfloat16*>(tensor.data)); break;
    case 4: function(static_cast<Half*>(tensor.data)); break;
    default: function(static_cast<float*>(nullptr));
    }
}

inline float root(float x) { return sqrtf(x); }
inline double root(double x) { return sqrt(x); }
inline double add_square(double sum, float x) { return fma(double(x), double(x), sum); }  // the square is exact
inline double add_square(double sum, double x) { return sum + x * x; }

// ---- where things are

// A payload: rows of bits, each followed by the scales of its pieces and zeros up to ROW_ALIGNMENT.
struct Message {
    unsigned char* bytes;
    Int row_elements, pieces;

    Int used_bytes() const { return row_elements / 8 + pieces * Int(sizeof(REAL)); }
    Int row_bytes() const { return (used_bytes() + ROW_ALIGNMENT - 1) / ROW_ALIGNMENT * ROW_ALIGNMENT; }

    // Half a row's signs at [0], those of the next row at [2], ...
    Word* signs(const Block& block, int half) const
    {
        Int row = block.piece / pieces;
        return reinterpret_cast<Word*>(bytes + row * row_bytes() + (block.start - row * row_elements) / 8) + half;
    }

    REAL* scale(Int piece) const
    {
        return reinterpret_cast<REAL*>(bytes + piece / pieces * row_bytes() + row_elements / 8) + piece % pieces;
    }
};

// A thread's part of the work. Past the table's end there are no rows.
struct Thread {
    Int index;
    int team, lane, half, bit, rows, real;
    Block block;
    const Word* mask;  // as Message::signs; null where every element is active

    Thread(const Block* blocks, Int count, const unsigned char* bits)
    {
        team = threadIdx.x / LANES, lane = threadIdx.x % LANES, half = lane / WARP, bit = lane % WARP;
        index = Int(blockIdx.x) * TEAMS + team;
        block = index < count ? blocks[index] : Block{};
        rows = int(block.length / LANES), real = int(block.real);
        mask = block.full ? nullptr : reinterpret_cast<const Word*>(bits + block.start / 8) + half;
    }

    Int first() const { return block.start + lane; }            // in the vector
    Int first_in_group() const { return block.offset + lane; }
    bool is_real(int row) const { return row * LANES + lane < real; }
    bool has(Word word) const { return word >> bit & 1; }
    Word active(int row) const { return mask && row < rows ? mask[2 * row] : ALL; }  // for has()
};

// ---- sums

// Adds the threads of a warp as a tree. Its first thread gets the result.
template <class T>
inline T over_warp(T sum)
{
    for (int distance = WARP / 2; distance; distance /= 2) sum += __shfl_down_sync(ALL, sum, distance);
    return sum;
}

// Adds the lanes as a tree. Thread 0 of each team gets the result. All threads of the CUDA block must
// call it.
inline double over_lanes(const Thread& thread, double sum)
{
    __shared__ double right[TEAMS][WARP];
    if (thread.half == 1) right[thread.team][thread.bit] = sum;
    __syncthreads();
    return over_warp(sum + right[thread.team][thread.bit]);
}

// The sum of `count` values in the order of LANES lanes, by a warp: each thread has lanes j and j + WARP,
// and loads AHEAD values of each at the same time. Past the end it adds 0.
inline double in_lanes(const double* values, Int count)
{
    constexpr int AHEAD = 8;
    int lane = threadIdx.x % WARP;
    double low = 0, high = 0;
    for (Int at = lane; at - lane < count; at += AHEAD * LANES) {
        double next[AHEAD][2];
        #pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            Int left = at + i * LANES, right = left + WARP;
            next[i][0] = left < count ? values[left] : 0, next[i][1] = right < count ? values[right] : 0;
        }
        #pragma unroll
        for (int i = 0; i < AHEAD; i++) low += next[i][0], high += next[i][1];
    }
    return over_warp(low + high);
}

// Writes a block's sum, and where in the table its group begins and ends.
inline void leave_sum(const Thread& thread, const Block* blocks, Int count, double sum, double* sums, Int* ranges)
{
    sum = over_lanes(thread, sum);
    if (thread.lane || thread.index >= count) return;
    sums[thread.index] = sum;
    Int group = blocks[thread.index].group, after = thread.index + 1;
    if (blocks[thread.index].offset == 0) ranges[2 * group] = thread.index;
    if (after == count || blocks[after].group != group) ranges[2 * group + 1] = after;
}

inline Int group_of_warp() { return Int(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP; }

// The sum of a group's blocks, by a warp.
inline double sum_of_group(Int group, const double* sums, const Int* ranges, const Int* lengths)
{
    Int first = 0, end = 0;
    if (lengths[group]) first = ranges[2 * group], end = ranges[2 * group + 1];
    return in_lanes(sums + first, end - first);
}

// group_sums[group] = sum of its blocks. One warp per group.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
sum_groups(const double* sums, const Int* ranges, const Int* lengths, Int groups, double* group_sums)
{
    Int group = group_of_warp();
    if (group >= groups) return;
    double sum = sum_of_group(group, sums, ranges, lengths);
    if (threadIdx.x % WARP == 0) group_sums[group] = sum;
}

// scales[group] = sqrt(sum of its blocks / its active elements). One warp per group.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
scale_groups(const double* sums, const Int* ranges, const Int* lengths, const double* counts, Int groups, REAL* scales)
{
    Int group = group_of_warp();
    if (group >= groups) return;
    double sum = sum_of_group(group, sums, ranges, lengths);
    if (threadIdx.x % WARP == 0) scales[group] = REAL(root(sum / counts[group]));
}

// Writes the scales into the payload, and the zeros behind each row's last. One thread per piece.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
append_scales(const REAL* scales, const Int* piece_groups, Int all_pieces, Int row_elements, Int pieces, unsigned char* payload)
{
    Int piece = Int(blockIdx.x) * THREADS + threadIdx.x;
    if (piece >= all_pieces) return;
    Message message{payload, row_elements, pieces};
    REAL* place = message.scale(piece);
    *place = scales[piece_groups[piece]];
    if (piece % pieces == pieces - 1)
        for (Int i = (message.row_bytes() - message.used_bytes()) / Int(sizeof(REAL)); i; i--) place[i] = 0;
}

// ---- compress and average

// z of a worker: weight * gradient + factor * the momentum's scale * its signs.
template <class G>
struct WorkerTerm {
    const G* gradient;  // this thread's first element; null: 0
    REAL weight;
    const Word* signs;  // null: no momentum
    REAL scale;

    WorkerTerm(const Thread& thread, const G* tensor, REAL weight, const Word* signs, REAL scale)
        : gradient(tensor ? tensor + thread.first_in_group() : nullptr), weight(weight), signs(signs), scale(scale) {}

    void get(const Thread& thread, int row, REAL (&z)[DEPTH]) const
    {
        G g[DEPTH];
        Word words[DEPTH];
        #pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            g[i] = gradient && thread.is_real(row + i) ? gradient[(row + i) * LANES] : G{};
            words[i] = signs && row + i < thread.rows ? signs[2 * (row + i)] : 0;
        }
        #pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            z[i] = gradient ? REAL(widen(g[i])) * weight : 0;
            if (signs) z[i] += thread.has(words[i]) ? scale : -scale;
        }
    }
};

// z of a server: the mean of what the ranks sent, added in rank order. Each lane of a warp divides one
// rank's scale.
struct ServerTerm {
    const Word* signs;  // rank 0's
    const REAL* scale;
    Int row_bytes;
    int ranks;

    template <class P>
    const P* of_rank(const P* pointer, int rank) const
    {
        return reinterpret_cast<const P*>(reinterpret_cast<const unsigned char*>(pointer) + rank * row_bytes);
    }

    void get(const Thread& thread, int row, REAL (&z)[DEPTH]) const
    {
        for (int i = 0; i < DEPTH; i++) z[i] = 0;
        for (int first = 0; first < ranks; first += WARP) {
            REAL mine = first + thread.bit < ranks ? *of_rank(scale, first + thread.bit) / REAL(ranks) : 0;
            for (int rank = first; rank < ranks && rank < first + WARP; rank++) {
                REAL share = __shfl_sync(ALL, mine, rank - first);
                const Word* words = of_rank(signs, rank);
                #pragma unroll
                for (int i = 0; i < DEPTH; i++) {
                    Word word = row + i < thread.rows ? words[2 * (row + i)] : 0;
                    z[i] += thread.has(word) ? share : -share;
                }
            }
        }
    }
};

// Writes c = z + (old - scale * sign(old)), 0 where not active, to `out`, and its signs to `signs`.
// Returns the thread's part of ||c||^2. `old` and `out` may be the same memory, because each element is
// read by the thread that writes it.
template <class Term>
inline double compensate(const Thread& thread, const Term& term, const REAL* old, REAL scale, REAL* out, Word* signs)
{
    double sum = 0;
    old += thread.first(), out += thread.first();
    for (int row = 0; row < thread.rows; row += DEPTH) {
        REAL before[DEPTH], z[DEPTH];
        Word active[DEPTH];
        #pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            before[i] = row + i < thread.rows ? old[(row + i) * LANES] : 0;
            active[i] = thread.active(row + i);
        }
        term.get(thread, row, z);
        Word packed = 0;
        #pragma unroll
        for (int i = 0; i < DEPTH; i++)
            if (row + i < thread.rows) {
                REAL c = thread.has(active[i]) ? z[i] + (before[i] - (before[i] >= 0 ? scale : -scale)) : 0;
                out[(row + i) * LANES] = c;
                sum = add_square(sum, c);
                Word word = __ballot_sync(ALL, c >= 0);
                if (thread.bit == i) packed = word;
            }
        if (thread.bit < DEPTH && row + thread.bit < thread.rows) signs[2 * (row + thread.bit)] = packed;
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
compress(const Block* blocks, Int count, const unsigned char* mask, Int row_elements, Int pieces, const Tensor* tensors,
         unsigned char* momentum, const REAL* old, const REAL* scales, REAL* out, unsigned char* payload, double* sums, Int* ranges)
{
    Thread thread(blocks, count, mask);
    Message received{momentum, row_elements, pieces}, sent{payload, row_elements, pieces};
    double sum = 0;
    if (thread.rows) {
        const Block& block = thread.block;
        const Tensor& tensor = tensors[block.group];
        const Word* signs = momentum ? received.signs(block, thread.half) : nullptr;
        REAL factor = momentum ? *received.scale(block.piece) * REAL(tensor.numbers[1]) : 0;
        in_its_type(tensor, [&](auto* gradient) {
            WorkerTerm term(thread, gradient, REAL(tensor.numbers[0]), signs, factor);
            sum = compensate(thread, term, old, scales[block.group], out, sent.signs(block, thread.half));
        });
    }
    leave_sum(thread, blocks, count, sum, sums, ranges);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
average(const Block* blocks, Int count, const unsigned char* mask, Int row_elements, Int pieces, unsigned char* received, Int ranks,
        const REAL* old, const REAL* scales, REAL* out, unsigned char* payload, double* sums, Int* ranges)
{
    Thread thread(blocks, count, mask);
    Message first{received, row_elements, pieces}, sent{payload, row_elements, pieces};
    double sum = 0;
    if (thread.rows) {
        const Block& block = thread.block;
        ServerTerm term{first.signs(block, thread.half), first.scale(block.piece), first.row_bytes(), int(ranks)};
        sum = compensate(thread, term, old, scales[block.group], out, sent.signs(block, thread.half));
    }
    leave_sum(thread, blocks, count, sum, sums, ranges);
}

// ---- update

// What a tensor has of its own, in cuda.py's order.
struct Moves {
    REAL decay, step, eps, limit;

    explicit Moves(const double (&n)[8]) : decay(n[0]), step(n[1]), eps(n[2]), limit(n[3]) {}
};

// x <- decay x - move, where move = +-size / (sqrt(v) + eps) within +-limit, or 0 where not active.
// Adds to `bounded` the number of moves that were beyond. NaN is not beyond, and stays.
template <class X>
inline void move_team(const Thread& thread, X* x, const REAL* variance, const Word* signs, REAL size, const Moves& moves,
                      unsigned long long* bounded)
{
    int beyond = 0;
    variance += thread.first(), x += thread.first_in_group();
    for (int row = 0; row < thread.rows; row += DEPTH) {
        REAL v[DEPTH];
        X before[DEPTH];
        Word words[DEPTH], active[DEPTH];
        #pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            v[i] = row + i < thread.rows ? variance[(row + i) * LANES] : 0;
            before[i] = thread.is_real(row + i) ? x[(row + i) * LANES] : X{};
            words[i] = row + i < thread.rows ? signs[2 * (row + i)] : 0;
            active[i] = thread.active(row + i);
        }
        #pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            REAL move = thread.has(words[i]) ? size : -size;
            move = move == 0 || !thread.has(active[i]) ? 0 : move / (root(v[i]) + moves.eps);  // not 0 / 0 where v and eps are 0
            bool over = move > moves.limit, under = move < -moves.limit;
            move = over ? moves.limit : under ? -moves.limit : move;
            if (!thread.is_real(row + i)) continue;
            beyond += over || under;
            narrow(REAL(widen(before[i])) * moves.decay - move, x[(row + i) * LANES]);
        }
    }
    beyond = over_warp(beyond);
    if (beyond && thread.bit == 0) atomicAdd(bounded, static_cast<unsigned long long>(beyond));
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
update(const Block* blocks, Int count, const unsigned char* mask, Int row_elements, Int pieces, const Tensor* tensors,
       unsigned char* momentum, const REAL* variance, unsigned long long* bounded)
{
    Thread thread(blocks, count, mask);
    if (!thread.rows) return;
    Message received{momentum, row_elements, pieces};
    const Tensor& tensor = tensors[thread.block.group];
    Moves moves(tensor.numbers);
    REAL size = *received.scale(thread.block.piece) * moves.step;
    in_its_type(tensor, [&](auto* x) {
        if (x) move_team(thread, x, variance, received.signs(thread.block, thread.half), size, moves, bounded);
    });
}

// ---- Adam

// What a tensor has of its own, in cuda.py's order.
struct Rates {
    REAL beta1, rest1, beta2, rest2, decay, step, eps, root_factor;

    explicit Rates(const double (&n)[8])
        : beta1(n[0]), rest1(n[1]), beta2(n[2]), rest2(n[3]), decay(n[4]), step(n[5]), eps(n[6]), root_factor(n[7]) {}
};

// m <- beta1 m + rest1 g; v <- beta2 v + rest2 g^2;
// x <- decay x - (step m) / (root_factor sqrt(v) + eps), unless x is null.
template <class X>
inline void adam_team(const Thread& thread, X* x, const REAL* gradient, REAL* momentum, REAL* variance, const Rates& rates)
{
    gradient += thread.first(), momentum += thread.first(), variance += thread.first(), x += x ? thread.first_in_group() : 0;
    for (int row = 0; row < thread.rows; row += DEPTH) {
        REAL g[DEPTH], m[DEPTH], v[DEPTH];
        X before[DEPTH];
        #pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            bool real = thread.is_real(row + i);
            int at = (row + i) * LANES;
            g[i] = real ? gradient[at] : 0, m[i] = real ? momentum[at] : 0, v[i] = real ? variance[at] : 0;
            before[i] = x && real ? x[at] : X{};
        }
        #pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            if (!thread.is_real(row + i)) continue;
            int at = (row + i) * LANES;
            momentum[at] = m[i] = m[i] * rates.beta1 + g[i] * rates.rest1;
            variance[at] = v[i] = v[i] * rates.beta2 + g[i] * g[i] * rates.rest2;
            REAL move = m[i] * rates.step / (root(v[i]) * rates.root_factor + rates.eps);
            if (x) narrow(REAL(widen(before[i])) * rates.decay - move, x[at]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 3)
adam(const Block* blocks, Int count, const unsigned char* mask, const Tensor* tensors, const REAL* gradient, REAL* momentum, REAL* variance)
{
    Thread thread(blocks, count, mask);
    if (!thread.real) return;
    const Tensor& tensor = tensors[thread.block.group];
    in_its_type(tensor, [&](auto* x) { adam_team(thread, x, gradient, momentum, variance, Rates(tensor.numbers)); });
}

// ---- measure

template <class G>
inline double squares_of_team(const Thread& thread, const G* gradient, unsigned long long* late)
{
    double sum = 0;
    int found = 0;
    gradient += thread.first_in_group();
    for (int row = 0; row < thread.rows; row += DEPTH) {
        G g[DEPTH];
        Word active[DEPTH];
        #pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            g[i] = thread.is_real(row + i) ? gradient[(row + i) * LANES] : G{};
            active[i] = thread.active(row + i);
        }
        #pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            sum = add_square(sum, REAL(widen(g[i])));
            found += widen(g[i]) != 0 && !thread.has(active[i]);
        }
    }
    if (found) atomicAdd(late, static_cast<unsigned long long>(found));
    return sum;
}

// Writes each block's sum of squares, and adds to `late` the number of masked elements that are not 0.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
measure(const Block* blocks, Int count, const unsigned char* mask, const Tensor* tensors, unsigned long long* late, double* sums, Int* ranges)
{
    Thread thread(blocks, count, mask);
    double sum = 0;
    if (thread.rows)
        in_its_type(tensors[thread.block.group], [&](auto* gradient) {
            if (gradient) sum = squares_of_team(thread, gradient, late);
        });
    leave_sum(thread, blocks, count, sum, sums, ranges);
}

// [the sum of all groups, late]; one warp.
extern "C" __global__ void total(const double* group_sums, Int count, const unsigned long long* late, double* result)
{
    double sum = in_lanes(group_sums, count);
    if (threadIdx.x == 0) result[0] = sum, result[1] = double(*late);
}
