// Runs the instructions of ptx.py on a CPU, a warp at a time, and stands in for the CUDA runtime that a compiled host
// wrapper calls. One library holds this file and one kernel's wrapper; see launch.py and docs/develop.md.
//
// A few clusters run at a time, and the next begins when one has ended. A round gives each of their warps a turn; in a
// turn a warp runs instructions until it waits or the turn is over. A schedule says how many clusters run, how long turns
// are, in which order warps come, and by how many rounds asynchronous copies and WGMMA are late.

#include <algorithm>
#include <array>
#include <bit>
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "names.h"

namespace {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr u32 ALL = 0xffffffff;
constexpr int LANES = 32;
// a mapped address of shared memory has the rank of its CTA, plus one, above these bits
constexpr int RANK_SHIFT = 24;
// rounds in which nothing happens before a launch counts as hanging
constexpr int IDLE_ROUNDS = 2000;
// most clusters at a time
constexpr u32 RESIDENT = 4;

struct Stop : std::runtime_error {
  using runtime_error::runtime_error;
};

[[noreturn]] void stop(const std::string& why) { throw Stop(why); }

std::string text(u64 value) { return std::to_string(value); }

// ---- numbers ----

int width(int type) {
  switch (type) {
    case TYPE_B8: case TYPE_U8: case TYPE_S8: case TYPE_E4M3: return 1;
    case TYPE_B16: case TYPE_U16: case TYPE_S16: case TYPE_F16: case TYPE_BF16: case TYPE_E4M3X2: return 2;
    case TYPE_B64: case TYPE_U64: case TYPE_S64: case TYPE_PRED: return 8;
    default: return 4;
  }
}

bool is_signed(int type) { return type == TYPE_S8 || type == TYPE_S16 || type == TYPE_S32 || type == TYPE_S64; }
bool is_float(int type) { return type == TYPE_F16 || type == TYPE_BF16 || type == TYPE_F32; }

u64 cut(u64 value, int bytes) { return bytes == 8 ? value : value & ((1ull << 8 * bytes) - 1); }

// The value of the low bits of a register, sign- or zero-extended.
u64 extended(u64 value, int type) {
  switch (type) {
    case TYPE_S8: return (u64)(i64)(i8)value;
    case TYPE_S16: return (u64)(i64)(i16)value;
    case TYPE_S32: return (u64)(i64)(i32)value;
    default: return cut(value, width(type));
  }
}

float real_e4m3(u64 value) {
  const int exponent = value >> 3 & 15, mantissa = value & 7;
  if ((value & 127) == 127) return NAN;
  const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
  return value & 128 ? -size : size;
}

float real(u64 value, int type) {
  if (type == TYPE_E4M3) return real_e4m3(value);
  switch (type) {
    case TYPE_F32: return std::bit_cast<float>((u32)value);
    case TYPE_BF16: return std::bit_cast<float>((u32)value << 16);
    case TYPE_F16: return (float)std::bit_cast<_Float16>((u16)value);
    default: stop("not a type of real numbers");
  }
}

u64 word(float value) { return std::bit_cast<u32>(value); }

u64 rounded(float value, int type) {
  if (type == TYPE_F32) return word(value);
  if (value != value) return 0x7fff;
  if (type == TYPE_F16) return std::bit_cast<u16>((_Float16)value);
  const u32 bits = std::bit_cast<u32>(value);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

template <class T>
bool ordered(int how, T a, T b) {
  switch (how) {
    case COMPARE_EQ: return a == b;
    case COMPARE_NE: return a != b;
    case COMPARE_LT: return a < b;
    case COMPARE_LE: return a <= b;
    case COMPARE_GT: return a > b;
    default: return a >= b;
  }
}

bool compare(int how, u64 a, u64 b, int type) {
  if (is_float(type)) {
    const float x = real(a, type), y = real(b, type);
    // the second six are true of NaN
    if (x != x || y != y) return how >= COMPARE_EQU;
    return ordered(how % COMPARE_EQU, x, y);
  }
  const u64 x = extended(a, type), y = extended(b, type);
  return is_signed(type) ? ordered(how, (i64)x, (i64)y) : ordered(how, x, y);
}

// The larger or smaller of two values; one that is NaN yields the other, unless `nan`.
float largest(float a, float b, bool smallest, bool nan) {
  if ((a != a && b != b) || (nan && (a != a || b != b))) return std::bit_cast<float>(0x7fffffffu);
  if (a != a || b != b) return a != a ? b : a;
  if (a == b) return std::signbit(a) == smallest ? a : b;
  return (a > b) == smallest ? b : a;
}

u64 compute_f32(const Instruction& in, float a, float b, float c) {
  // in the order of ptx.ROUNDINGS
  static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  std::fesetround(modes[in.mode]);
  volatile float x = a, y = b, result = 0;
  switch (in.operation) {
    case OP_ADD: result = x + y; break;
    case OP_SUB: result = x - y; break;
    case OP_MUL: result = x * y; break;
    case OP_MAD: result = std::fma(x, y, c); break;
    case OP_DIV: result = x / y; break;
    case OP_SQRT: result = std::sqrt(x); break;
    case OP_RCP: result = 1 / x; break;
    case OP_MIN: case OP_MAX: result = largest(a, b, in.operation == OP_MIN, in.flags & KEEP_NAN); break;
    default: stop("an operation that f32 does not have");
  }
  std::fesetround(FE_TONEAREST);
  return word(result);
}

// A float that rounds to 16 bits as `value` does: not exact ones have an odd last bit.
float to_odd(double value) {
  const float nearest = (float)value;
  if (nearest != nearest || std::isinf(nearest) || (double)nearest == value) return nearest;
  u32 bits = std::bit_cast<u32>(nearest);
  if (std::fabs((double)nearest) > std::fabs(value)) bits--;
  return std::bit_cast<float>(bits | 1);
}

// Arithmetic of one or two values of 16 bits in a register.
u64 compute_halves(const Instruction& in, u64 a, u64 b, u64 c) {
  const int kind = in.type == TYPE_BF16X2 || in.type == TYPE_BF16 ? TYPE_BF16 : TYPE_F16;
  if (in.mode) stop("a directed rounding to 16 bits");
  u64 result = 0;
  for (int shift = 0; shift < 8 * width(in.type); shift += 16) {
    const auto part = [&](u64 value) { return (double)real(value >> shift & 0xffff, kind); };
    double exact = 0;
    switch (in.operation) {
      case OP_ADD: exact = part(a) + part(b); break;
      case OP_SUB: exact = part(a) - part(b); break;
      case OP_MUL: exact = part(a) * part(b); break;
      case OP_MAD: exact = part(a) * part(b) + part(c); break;
      case OP_MIN: case OP_MAX:
        exact = largest((float)part(a), (float)part(b), in.operation == OP_MIN, in.flags & KEEP_NAN);
        break;
      default: stop("an operation that 16-bit values do not have");
    }
    result |= rounded(to_odd(exact), kind) << shift;
  }
  return result;
}

u64 convert(const Instruction& in, u64 a, u64 b) {
  const int to = in.type, from = in.source;
  const auto half = [&](u64 value, int type) {
    const float x = real(value, TYPE_F32);
    return rounded((in.flags & RELU) && !(x > 0) && x == x ? 0.0f : x, type);
  };
  if (from == TYPE_E4M3X2) {
    if (to != TYPE_F16X2) stop("a conversion between these types");
    return rounded(real_e4m3(a >> 8 & 255), TYPE_F16) << 16 | rounded(real_e4m3(a & 255), TYPE_F16);
  }
  if (to == TYPE_BF16X2) return half(a, TYPE_BF16) << 16 | half(b, TYPE_BF16);
  if (to == TYPE_F16X2) return half(a, TYPE_F16) << 16 | half(b, TYPE_F16);
  if (is_float(from) && is_float(to)) {
    return from == TYPE_F32 ? half(a, to) : rounded(real(a, from), to);
  }
  if (from == TYPE_F32 && to == TYPE_S32) {
    const float x = real(a, from);
    if (!(x > -2147483648.0f && x < 2147483648.0f)) stop("a conversion of a value that is no 32-bit integer");
    return (u32)(i32)x;
  }
  if (is_float(from) || (is_float(to) && to != TYPE_F32)) stop("a conversion between these types");
  const u64 value = extended(a, from);
  if (to == TYPE_F32) return word(is_signed(from) ? (float)(i64)value : (float)value);
  return cut(is_signed(to) ? extended(value, to) : value, std::max(width(to), 4));
}

u64 dot(u64 a, u64 b, u64 c, int count, int bytes, bool signed_a, bool signed_b) {
  i64 sum = (i32)c;
  for (int i = 0; i < count; i++) {
    const u64 x = a >> 8 * bytes * i, y = b >> 8 * i;
    const i64 left = signed_a ? (bytes == 1 ? (i64)(i8)x : (i64)(i16)x) : (i64)cut(x, bytes);
    sum += left * (signed_b ? (i64)(i8)y : (i64)(u8)y);
  }
  return (u32)sum;
}

// The result of one lane of an instruction without side effects.
u64 compute(const Instruction& in, u64 a, u64 b, u64 c) {
  const int type = in.type, bytes = width(type), bits = 8 * bytes;
  switch (in.operation) {
    case OP_MOV: return cut(a, bytes);
    case OP_AND: return cut(a & b, bytes);
    case OP_OR: return cut(a | b, bytes);
    case OP_XOR: return cut(a ^ b, bytes);
    case OP_NOT: return type == TYPE_PRED ? ~a & 1 : cut(~a, bytes);
    case OP_SHL: return (u32)b >= (u32)bits ? 0 : cut(a << (u32)b, bytes);
    case OP_SHR:
      if (is_signed(type)) return cut((u64)((i64)extended(a, type) >> std::min<u32>((u32)b, bits - 1)), bytes);
      return (u32)b >= (u32)bits ? 0 : cut(a, bytes) >> (u32)b;
    case OP_POPC: return std::popcount(cut(a, bytes));
    case OP_CLZ: return std::countl_zero(cut(a, bytes)) - (64 - bits);
    case OP_SELP: return cut(c & 1 ? a : b, bytes);
    case OP_SETP: return compare(in.mode, a, b, type);
    case OP_CVT: return convert(in, a, b);
    case OP_DP4A: return dot(a, b, c, 4, 1, type == TYPE_S32, in.source == TYPE_S32);
    case OP_DP2A: return dot(a, b >> 16 * in.mode, c, 2, 2, type == TYPE_S32, in.source == TYPE_S32);
    case OP_SET: {
      if (in.source != TYPE_BF16X2 && in.source != TYPE_F16X2) stop("set of this type");
      const int kind = in.source == TYPE_BF16X2 ? TYPE_BF16 : TYPE_F16;
      u64 result = 0;
      for (int shift : {0, 16}) {
        if (compare(in.mode, a >> shift & 0xffff, b >> shift & 0xffff, kind)) result |= 0xffffull << shift;
      }
      return result;
    }
    case OP_PRMT: {
      const u64 both = (u64)(u32)b << 32 | (u32)a;
      u64 result = 0;
      for (int i = 0; i < 4; i++) {
        const int selected = c >> 4 * i & 15;
        u8 byte = both >> 8 * (selected & 7);
        if (selected & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= (u64)byte << 8 * i;
      }
      return result;
    }
    case OP_NEG:
      if (type == TYPE_F32) return (u32)a ^ 0x80000000u;
      return cut(-a, bytes);
    case OP_ABS:
      if (type == TYPE_F32) return (u32)a & 0x7fffffffu;
      return cut((u64)std::abs((i64)extended(a, type)), bytes);
    default: break;
  }
  if (type == TYPE_F32) return compute_f32(in, real(a, type), real(b, type), real(c, type));
  if (is_float(type) || type == TYPE_BF16X2 || type == TYPE_F16X2) return compute_halves(in, a, b, c);
  const u64 x = extended(a, type), y = extended(b, type);
  const bool sign = is_signed(type);
  switch (in.operation) {
    case OP_ADD: return cut(x + y, bytes);
    case OP_SUB: return cut(x - y, bytes);
    case OP_MUL: return cut(x * y, bytes);
    case OP_MAD: return cut(x * y + c, bytes);
    case OP_MUL_WIDE: return cut(x * y, 2 * bytes);
    case OP_MUL_HI:
      if (bytes > 4 && sign) stop("mul.hi of this type");
      if (bytes > 4) return (u64)((unsigned __int128)x * y >> 64);
      return cut(sign ? (u64)((i64)(x * y) >> 8 * bytes) : x * y >> 8 * bytes, bytes);
    // of a division by zero PTX says nothing
    case OP_DIV: return !y ? cut(~0ull, bytes) : cut(sign ? (u64)((i64)x / (i64)y) : x / y, bytes);
    case OP_REM: return !y ? cut(x, bytes) : cut(sign ? (u64)((i64)x % (i64)y) : x % y, bytes);
    case OP_MIN: case OP_MAX: {
      const bool less = sign ? (i64)x < (i64)y : x < y;
      const u64 chosen = less == (in.operation == OP_MIN) ? x : y;
      return in.flags & RELU && (i64)chosen < 0 ? 0 : cut(chosen, bytes);
    }
    default: stop("an operation that integers do not have");
  }
}

u64 reduced(int how, u64 a, u64 b, int type) {
  if (how == REDUCE_ADD) return type == TYPE_F32 ? word(real(a, type) + real(b, type)) : cut(a + b, width(type));
  if (is_float(type)) stop("a reduction of this type");
  if (how == REDUCE_OR) return a | b;
  return compare(how == REDUCE_MIN ? COMPARE_LT : COMPARE_GT, a, b, type) ? a : b;
}

// ---- state ----

struct Program {
  std::vector<Instruction> instructions;
  std::vector<i32> operands;
  // each is repeated for every lane
  std::vector<u64> constants;
  int registers = 0;
  std::vector<std::pair<u32, u32>> parameters;
  std::vector<u8> memory;
  u8* parameter_memory = nullptr;
};

struct Launch {
  u32 grid[3], block[3], cluster[3] = {1, 1, 1};
  u32 shared;
};

struct Schedule {
  u64 seed = 0;
  // WGMMA runs when a warp of its group waits for it, not when it is issued
  bool late_wgmma = false;
  // most rounds by which an asynchronous copy is late; 0: it happens at once
  u32 delay = 0;
};

struct Mbarrier {
  u32 phase = 0;
  i64 expected = 0, pending = 0, bytes = 0;
};

struct NamedBarrier {
  u64 generation = 0;
  int arrived = 0, expected = 0;
};

struct Copy {
  int lane;
  u64 target, source;
  int size, read, group;
};

struct Wgmma {
  const Instruction* in;
  int group;
  bool accumulate;
  u64 a, b;
};

struct Cta;

struct Warp {
  Cta* cta;
  int id;
  std::vector<u64> registers;
  u32 alive = ALL;
  std::array<int, LANES> pc{};
  // lanes that wait until the next turn, and for what
  u32 waiting = 0;
  std::string reason;
  // how often it looked at a word that others write since it did anything else
  int looks = 0;
  // events of the cluster when an mbarrier was last found incomplete
  u64 looked = ~0ull;
  // the named barrier at which it is, or -1
  int barrier = -1;
  u64 generation = 0, cluster_generation = 0;
  bool at_cluster = false;
  std::vector<Copy> copies;
  std::array<int, LANES> copy_groups{};
  std::vector<Wgmma> wgmma;
  int wgmma_groups = 0, stores = 0;
};

struct Cluster;

struct Cta {
  Cluster* cluster;
  u32 rank;
  u32 index[3];
  std::vector<u8> shared;
  std::vector<Warp> warps;
  std::array<NamedBarrier, 16> barriers;
  std::unordered_map<u64, Mbarrier> mbarriers;
};

struct Delayed {
  int rounds;
  std::function<void()> run;
};

struct Cluster {
  const Launch* launch;
  std::vector<Cta> ctas;
  std::vector<Delayed> delayed;
  u64 generation = 0;
  u32 arrived = 0, threads = 0;
  // counts all that may end a wait
  u64 events = 0;
};

std::map<std::string, Program> programs;
std::vector<std::pair<u64, u64>> allocations;
Schedule schedule;
std::string failure;
u64 random_state = 1;
// where an error happens
const Warp* running = nullptr;
const Instruction* current = nullptr;

u32 draw(u32 below) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (u32)((random_state >> 11) % below);
}

// ---- memory ----

u8* global(u64 address, u64 bytes, bool write) {
  for (const auto& [begin, end] : allocations) {
    if (address >= begin && address + bytes <= end) return (u8*)address;
  }
  stop(std::string(write ? "global write" : "global read") + " out of bounds, of " + text(bytes) + " bytes");
}

// The CTA of an address of shared memory, which becomes an offset in that CTA.
Cta& owner(Cta& cta, u64& address) {
  if (address >> 32) stop("an address that is not of shared memory");
  const u64 mapped = address >> RANK_SHIFT;
  address &= (1u << RANK_SHIFT) - 1;
  if (!mapped) return cta;
  if (mapped > cta.cluster->ctas.size()) stop("shared memory of a CTA that the cluster lacks");
  return cta.cluster->ctas[mapped - 1];
}

u8* shared(Cta& cta, u64 address, u64 bytes, u64 alignment) {
  Cta& target = owner(cta, address);
  if (address < SHARED_BASE || address + bytes > target.shared.size()) {
    stop("shared access out of bounds at " + text(address) + ", of " + text(bytes) + " bytes");
  }
  if (address % alignment) stop("shared access at " + text(address) + ", not a multiple of " + text(alignment));
  return &target.shared[address];
}

Mbarrier& mbarrier(Cta& cta, u64 address) {
  Cta& target = owner(cta, address);
  const auto found = target.mbarriers.find(address);
  if (found == target.mbarriers.end()) stop("no mbarrier was initialised at " + text(address));
  return found->second;
}

void settle(Cta& cta, Mbarrier& barrier) {
  if (!barrier.pending && !barrier.bytes) {
    barrier.phase ^= 1;
    barrier.pending = barrier.expected;
  }
  cta.cluster->events++;
}

void arrive(Cta& cta, u64 address, i64 count) {
  Mbarrier& barrier = mbarrier(cta, address);
  if (barrier.pending < count) stop("more arrivals than the mbarrier at " + text(address) + " expects");
  barrier.pending -= count;
  settle(cta, barrier);
}

void complete(Cta& cta, u64 address, i64 bytes) {
  Mbarrier& barrier = mbarrier(cta, address);
  barrier.bytes -= bytes;
  settle(cta, barrier);
}

// ---- tiles in shared memory ----

// `span`: bytes of a row that the swizzle permutes, 16 for none.
u64 swizzled(u64 address, u32 span) { return address ^ ((address >> 7 & (span / 16 - 1)) << 4); }

// A tensor map, as the host code of a kernel writes it.
struct TensorMap {
  u64 base;
  u32 rank, span;
  u64 bytes;
  u64 size[5], stride[5], box[5];

  explicit TensorMap(u64 address) {
    static const u8 type_bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4};
    u64 w[8];
    std::memcpy(w, (const void*)address, sizeof w);
    base = w[0];
    rank = (w[1] >> 4 & 7) + 1;
    span = 16u << (w[1] >> 13 & 3);
    if ((w[1] >> 7 & 15) > 12 || (w[1] >> 11 & 3)) stop("a tensor map of an unknown type or interleaved");
    bytes = type_bytes[w[1] >> 7 & 15];
    const u64 low[4] = {w[1] >> 32, w[2] & ALL, w[2] >> 32, w[3] & ALL};
    for (u32 i = 0; i < 5; i++) {
      size[i] = (w[4 + i / 2] >> 32 * (i % 2) & ALL) + 1;
      box[i] = i >= rank ? 1 : (i ? w[7] >> 8 * (i - 1) & 255 : w[6] >> 56) + 1;
      stride[i] = i ? (low[i - 1] | (w[3] >> (28 + 4 * i) & 15) << 32) * 16 : bytes;
    }
    if (row() % 16 || (span > 16 && row() > span)) stop("a box whose rows do not fit its swizzle");
  }

  u64 row() const { return box[0] * bytes; }
  u64 rows() const { return box[1] * box[2] * box[3] * box[4]; }
  // of a tile in shared memory: the pattern of the swizzle repeats
  u64 alignment() const { return span == 128 ? 1024 : span > 16 ? 256 : 128; }

  // Call with the offset in the box, the global address and the bytes of each run that is inside the tensor.
  template <class F>
  void runs(const std::vector<i32>& at, F call) const {
    if (at.size() != rank) stop("a tensor map of rank " + text(rank) + " with " + text(at.size()) + " coordinates");
    const i64 first = std::max<i64>(at[0], 0), last = std::min<i64>(at[0] + (i64)box[0], (i64)size[0]);
    for (u64 r = 0; r < rows() && first < last; r++) {
      u64 address = base + first * bytes, rest = r;
      bool inside = true;
      for (u32 i = 1; i < rank; i++) {
        const i64 place = at[i] + (i64)(rest % box[i]);
        rest /= box[i];
        inside = inside && place >= 0 && place < (i64)size[i];
        address += place * stride[i];
      }
      if (inside) call(r * row() + (first - at[0]) * bytes, address, (last - first) * bytes);
    }
  }
};

void tma_load(Cta& cta, u64 target, u64 barrier, u64 map, const std::vector<i32>& at, u32 mask) {
  const TensorMap tensor(map);
  // zeros outside of the tensor
  std::vector<u8> box(tensor.row() * tensor.rows());
  tensor.runs(at, [&](u64 offset, u64 address, u64 bytes) {
    std::memcpy(&box[offset], global(address, bytes, false), bytes);
  });
  const auto put = [&](Cta& to, u64 place, u64 signal) {
    shared(to, place, box.size(), tensor.alignment());
    Cta& there = owner(to, place);
    for (u64 i = 0; i < box.size(); i += 16) std::memcpy(&there.shared[swizzled(place + i, tensor.span)], &box[i], 16);
    complete(to, signal, box.size());
  };
  if (!mask) return put(cta, target, barrier);
  const u64 offset = (1u << RANK_SHIFT) - 1;
  for (u32 rank = 0; rank < 16; rank++) {
    if (!(mask >> rank & 1)) continue;
    if (rank >= cta.cluster->ctas.size()) stop("a multicast to a CTA that the cluster lacks");
    put(cta.cluster->ctas[rank], target & offset, barrier & offset);
  }
}

void tma_store(Cta& cta, u64 source, u64 map, const std::vector<i32>& at) {
  const TensorMap tensor(map);
  shared(cta, source, tensor.row() * tensor.rows(), tensor.alignment());
  tensor.runs(at, [&](u64 offset, u64 address, u64 bytes) {
    u8* out = global(address, bytes, true);
    for (u64 i = 0; i < bytes; i++) out[i] = cta.shared[swizzled(source + offset + i, tensor.span)];
  });
}

// An operand of WGMMA in shared memory, by its descriptor.
struct Tile {
  Cta& cta;
  u32 start, leading, stride, span;
  int bytes;
  bool transposed;

  Tile(Cta& cta, u64 descriptor, int bytes, bool transposed) : cta(cta), bytes(bytes), transposed(transposed) {
    static const u32 spans[] = {16, 128, 64, 32};
    start = (descriptor & 0x3fff) << 4;
    leading = (descriptor >> 16 & 0x3fff) << 4;
    stride = (descriptor >> 32 & 0x3fff) << 4;
    span = spans[descriptor >> 62 & 3];
    if (descriptor >> 49 & 7) stop("a descriptor with a base offset");
    if (transposed && span == 16) stop("an MN-major operand without a swizzle");
  }

  u64 at(int mn, int k) const {
    u32 address;
    if (transposed) {
      const int per_row = span / bytes;
      address = start + mn % per_row * bytes + mn / per_row * leading + k % 8 * span + k / 8 * stride;
    } else {
      const u32 place = k * bytes;
      const u32 column = span == 16 ? place / 16 * leading + place % 16 : place;
      address = start + mn % 8 * span + mn / 8 * stride + column;
    }
    u64 value = 0;
    std::memcpy(&value, shared(cta, swizzled(address, span), bytes, bytes), bytes);
    return value;
  }
};

// Copies that are asynchronous on a GPU: at once, or by the schedule some rounds later.
void later(Cta& cta, std::function<void()> run) {
  if (!schedule.delay) return run();
  const Warp* warp = running;
  const Instruction* in = current;
  cta.cluster->delayed.push_back({(int)draw(schedule.delay) + 1, [=] {
    running = warp;
    current = in;
    run();
  }});
}

// ---- warps ----

enum class Next { ADVANCE, WAIT, JUMPED };

class Turn {
 public:
  Turn(Warp& warp, const Program& program)
      : warp(warp), cta(*warp.cta), cluster(*cta.cluster), program(program) {}

  // Run up to `count` instructions; false if all lanes wait, or merely look at an mbarrier or a word again.
  bool run(int count) {
    warp.waiting = 0;
    running = &warp;
    while (count-- > 0) {
      const u32 ready = warp.alive & ~warp.waiting;
      if (!ready) return !warp.alive;
      // the lanes that are furthest behind: so those that diverged meet again
      int pc = std::numeric_limits<int>::max();
      for (int lane = 0; lane < LANES; lane++) {
        if (ready >> lane & 1) pc = std::min(pc, warp.pc[lane]);
      }
      group = 0;
      for (int lane = 0; lane < LANES; lane++) group |= (u32)(warp.pc[lane] == pc) << lane;
      group &= ready;
      current = &program.instructions[pc];
      const Next next = step(*current);
      if (next == Next::ADVANCE) jump(group, pc + 1);
      if (next == Next::WAIT) warp.waiting |= group;
    }
    return (warp.alive & ~warp.waiting) && warp.looked != cluster.events && warp.looks < 2;
  }

  void finish(const Wgmma& product) const {
    const Instruction& in = *product.in;
    const int bytes = width(in.type), depth = 32 / bytes, row = warp.id % 4 * 16;
    double a[16][32], b[256][32];
    if (in.flags & IN_REGISTERS) {
      // read when it runs: the registers may not change before that
      from_registers(a, in, 2, 4, bytes);
    } else {
      const Tile tile(cta, product.a, bytes, in.flags & A_TRANSPOSED);
      for (int r = 0; r < 16; r++) {
        for (int k = 0; k < depth; k++) a[r][k] = number(tile.at(row + r, k), in.type);
      }
    }
    const Tile tile(cta, product.b, bytes, in.flags & B_TRANSPOSED);
    for (int n = 0; n < in.mode; n++) {
      for (int k = 0; k < depth; k++) b[n][k] = number(tile.at(n, k), in.type);
    }
    multiply(in, a, b, depth, [&](int v, int lane) { return product.accumulate ? output(in, v)[lane] : 0; });
  }

 private:
  Warp& warp;
  Cta& cta;
  Cluster& cluster;
  const Program& program;
  // lanes that run the instruction, and those of them for which its predicate holds
  u32 group = 0, mask = 0;

  const u64* value(int operand) const {
    return operand >= 0 ? &warp.registers[operand * LANES] : &program.constants[(-1 - operand) * LANES];
  }
  u64* output(const Instruction& in, int i) const { return &warp.registers[program.operands[in.first + i] * LANES]; }
  const u64* input(const Instruction& in, int i) const { return value(program.operands[in.first + in.outputs + i]); }

  template <class F>
  void each(F call) const {
    for (int lane = 0; lane < LANES; lane++) {
      if (mask >> lane & 1) call(lane);
    }
  }

  void jump(u32 lanes, int target) {
    for (int lane = 0; lane < LANES; lane++) {
      if (lanes >> lane & 1) warp.pc[lane] = target;
    }
  }

  Next wait(const std::string& reason) {
    warp.reason = reason;
    return Next::WAIT;
  }

  // Whether all living lanes of `wanted` are here.
  bool together(u32 wanted) const { return !(wanted & warp.alive & ~group); }

  Next step(const Instruction& in) {
    mask = group;
    if (in.guard >= 0) {
      const u64* guard = value(in.guard);
      for (int lane = 0; lane < LANES; lane++) {
        if ((guard[lane] & 1) == (u64)in.negated) mask &= ~(1u << lane);
      }
    }
    switch (in.operation) {
      case OP_BRANCH:
        jump(group & ~mask, (int)(&in - program.instructions.data()) + 1);
        jump(mask, in.target);
        return Next::JUMPED;
      case OP_EXIT:
        jump(group & ~mask, (int)(&in - program.instructions.data()) + 1);
        warp.alive &= ~mask;
        cluster.events++;
        return Next::JUMPED;
      case OP_PACK: case OP_UNPACK: case OP_LOAD: case OP_STORE: case OP_ATOM: case OP_ST_ASYNC: case OP_MAPA:
      case OP_LDMATRIX: case OP_STMATRIX:
        return memory(in);
      case OP_SHFL: case OP_VOTE: case OP_REDUX: case OP_ELECT: case OP_BAR_WARP:
        return mask ? collective(in) : Next::ADVANCE;
      case OP_BAR_SYNC: case OP_BAR_ARRIVE: case OP_CLUSTER_ARRIVE: case OP_CLUSTER_WAIT:
        return barrier(in);
      case OP_MBAR_INIT: case OP_MBAR_ARRIVE: case OP_MBAR_EXPECT: case OP_MBAR_TRY:
        return transaction(in);
      case OP_CP_ASYNC: case OP_CP_ARRIVE: case OP_CP_COMMIT: case OP_CP_WAIT: case OP_BULK_LOAD: case OP_TMA_LOAD:
      case OP_TMA_STORE: case OP_TMA_WAIT:
        return copy(in);
      case OP_MMA: case OP_WGMMA: case OP_WGMMA_COMMIT: case OP_WGMMA_WAIT:
        return tensor_cores(in);
      default: {
        u64* out = output(in, 0);
        const u64 *a = input(in, 0), *b = in.inputs > 1 ? input(in, 1) : a, *c = in.inputs > 2 ? input(in, 2) : a;
        each([&](int lane) { out[lane] = compute(in, a[lane], b[lane], c[lane]); });
        return Next::ADVANCE;
      }
    }
  }

  // ---- loads, stores ----

  u8* place(int space, u64 address, u64 bytes, bool write) const {
    if (space == SPACE_GENERIC) space = address >> 32 ? SPACE_GLOBAL : SPACE_SHARED;
    if (space == SPACE_PARAM) return (u8*)address;
    if (space == SPACE_SHARED) return shared(cta, address, bytes, bytes);
    if (address % bytes) stop("global access that is not aligned to its " + text(bytes) + " bytes");
    return global(address, bytes, write);
  }

  Next memory(const Instruction& in) {
    const int bytes = width(in.type);
    const u64* a = input(in, 0);
    switch (in.operation) {
      case OP_PACK: {
        const int part = bytes / in.inputs;
        each([&](int lane) {
          u64 value = 0;
          for (int i = 0; i < in.inputs; i++) value |= cut(input(in, i)[lane], part) << 8 * part * i;
          output(in, 0)[lane] = value;
        });
        break;
      }
      case OP_UNPACK: {
        const int part = bytes / in.outputs;
        each([&](int lane) {
          const u64 value = a[lane];
          for (int i = 0; i < in.outputs; i++) output(in, i)[lane] = cut(value >> 8 * part * i, part);
        });
        break;
      }
      case OP_LOAD:
        each([&](int lane) {
          u64 address = a[lane] + in.offset;
          if (in.mode == SPACE_PARAM) address += (u64)program.parameter_memory;
          const u8* from = place(in.mode, address, bytes * in.outputs, false);
          for (int i = 0; i < in.outputs; i++) {
            u64 value = 0;
            std::memcpy(&value, from + bytes * i, bytes);
            output(in, i)[lane] = cut(extended(value, in.type), std::max(bytes, 4));
          }
        });
        if (!(in.flags & SHARED_WORD)) break;
        // who waits for what others write looks again in its next turn
        jump(group, (int)(&in - program.instructions.data()) + 1);
        warp.waiting |= group;
        warp.reason = "a word that others write";
        warp.looks++;
        return Next::JUMPED;
      case OP_STORE:
        warp.looks = 0;
        each([&](int lane) {
          u8* to = place(in.mode, a[lane] + in.offset, bytes * (in.inputs - 1), true);
          for (int i = 1; i < in.inputs; i++) std::memcpy(to + bytes * (i - 1), &input(in, i)[lane], bytes);
        });
        break;
      case OP_ATOM:
        warp.looks = 0;
        each([&](int lane) {
          u8* at = place(in.mode, a[lane] + in.offset, bytes, true);
          u64 before = 0;
          std::memcpy(&before, at, bytes);
          const u64 after = reduced(in.flags, before, input(in, 1)[lane], in.type);
          std::memcpy(at, &after, bytes);
          if (in.outputs) output(in, 0)[lane] = before;
        });
        break;
      case OP_ST_ASYNC:
        each([&](int lane) {
          const int count = in.inputs - 2;
          std::vector<u8> values(bytes * count);
          for (int i = 0; i < count; i++) std::memcpy(&values[bytes * i], &input(in, 1 + i)[lane], bytes);
          const u64 target = a[lane] + in.offset, signal = input(in, count + 1)[lane] + in.offset2;
          later(cta, [&cta = cta, values, target, signal] {
            std::memcpy(shared(cta, target, values.size(), values.size()), values.data(), values.size());
            complete(cta, signal, values.size());
          });
        });
        break;
      case OP_MAPA:
        each([&](int lane) {
          // of a CTA that the cluster lacks, it must not be used
          const u64 rank = std::min<u64>((u32)input(in, 1)[lane], 254);
          output(in, 0)[lane] = cut(a[lane], 3) | (rank + 1) << RANK_SHIFT;
        });
        break;
      default: matrices(in);
    }
    return Next::ADVANCE;
  }

  // Four 8 x 8 matrices of 16 bits; lane 8 i + r has the address of row r of matrix i.
  void matrices(const Instruction& in) {
    if (group != ALL) stop("a matrix copy without all lanes");
    const bool load = in.operation == OP_LDMATRIX;
    const int count = load ? in.outputs : in.inputs - 1;
    for (int i = 0; i < count; i++) {
      for (int r = 0; r < 8; r++) {
        u8* row = shared(cta, input(in, 0)[8 * i + r] + in.offset, 16, 16);
        for (int c = 0; c < 8; c++) {
          const int high = in.flags & TRANSPOSED ? c : r, low = in.flags & TRANSPOSED ? r : c;
          const int lane = high * 4 + low / 2, shift = low % 2 * 16;
          u16 half = load ? 0 : input(in, 1 + i)[lane] >> shift;
          std::memcpy(load ? (u8*)&half : row + 2 * c, load ? row + 2 * c : (u8*)&half, 2);
          if (load) {
            u64& out = output(in, i)[lane];
            out = (u32)((out & ~(0xffffull << shift)) | (u64)half << shift);
          }
        }
      }
    }
  }

  // ---- lanes of a warp ----

  Next collective(const Instruction& in) {
    const int some = std::countr_zero(mask);
    const u32 members = (u32)input(in, in.inputs - 1)[some];
    if (!together(members)) return wait("other lanes");
    if (in.operation == OP_BAR_WARP) return Next::ADVANCE;
    std::array<u64, LANES> given{};
    std::copy_n(input(in, 0), LANES, given.begin());
    u64 result = 0;
    switch (in.operation) {
      case OP_SHFL: shuffle(in, given); return Next::ADVANCE;
      case OP_ELECT: {
        const int elected = std::countr_zero(members & mask);
        each([&](int lane) {
          output(in, 0)[lane] = elected;
          output(in, 1)[lane] = lane == elected;
        });
        return Next::ADVANCE;
      }
      case OP_VOTE: {
        u32 votes = 0;
        each([&](int lane) { votes |= (u32)(given[lane] & 1) << lane; });
        votes &= members;
        result = in.mode == VOTE_BALLOT ? votes : in.mode == VOTE_ANY ? votes != 0 : votes == (members & mask);
        break;
      }
      default: {
        result = given[some];
        each([&](int lane) {
          if (lane != some) result = reduced(in.mode, result, given[lane], in.type);
        });
        result = (u32)result;
      }
    }
    each([&](int lane) { output(in, 0)[lane] = result; });
    return Next::ADVANCE;
  }

  void shuffle(const Instruction& in, const std::array<u64, LANES>& given) {
    each([&](int lane) {
      const int by = input(in, 1)[lane] & 31, packed = input(in, 2)[lane];
      const int clamp = packed & 31, segment = packed >> 8 & 31;
      const int first = lane & segment, last = first | (clamp & ~segment);
      int from = in.mode == SHUFFLE_UP     ? lane - by
                 : in.mode == SHUFFLE_DOWN ? lane + by
                 : in.mode == SHUFFLE_BFLY ? lane ^ by
                                           : first | (by & ~segment);
      // "up" clamps at the first lane
      const bool inside = in.mode == SHUFFLE_UP ? from >= last : from <= last;
      if (!inside) from = lane;
      if (!(mask >> from & 1) && in.guard < 0 && (warp.alive >> from & 1)) stop("shfl from a lane that is not here");
      output(in, 0)[lane] = (u32)given[from];
      if (in.outputs > 1) output(in, 1)[lane] = inside;
    });
  }

  // ---- barriers ----

  Next barrier(const Instruction& in) {
    if (mask != group) stop("a barrier with a predicate");
    if (!together(ALL)) return wait("other lanes");
    warp.looks = 0;
    if (in.operation == OP_CLUSTER_ARRIVE) {
      warp.cluster_generation = cluster.generation;
      warp.at_cluster = true;
      cluster.arrived += std::popcount(group);
      cluster.events++;
      if (cluster.arrived == cluster.threads) {
        cluster.arrived = 0;
        cluster.generation++;
      }
      return Next::ADVANCE;
    }
    if (in.operation == OP_CLUSTER_WAIT) {
      if (!warp.at_cluster) stop("a wait for the cluster without an arrival");
      if (cluster.generation == warp.cluster_generation) return wait("the cluster");
      warp.at_cluster = false;
      return Next::ADVANCE;
    }
    const int lane = std::countr_zero(mask), id = input(in, 0)[lane];
    const u32* block = cluster.launch->block;
    const int count = in.inputs > 1 ? (int)input(in, 1)[lane] : (int)(block[0] * block[1] * block[2]);
    NamedBarrier& named = cta.barriers.at(id);
    if (warp.barrier >= 0) {
      if (named.generation == warp.generation) return wait("barrier " + text(id));
      warp.barrier = -1;
      return Next::ADVANCE;
    }
    if (named.arrived && named.expected != count) {
      stop("barrier " + text(id) + " of " + text(count) + " threads, of which others expect " + text(named.expected));
    }
    named.expected = count;
    named.arrived += LANES;
    cluster.events++;
    if (named.arrived > count) stop("more threads at barrier " + text(id) + " than " + text(count));
    const u64 generation = named.generation;
    if (named.arrived == count) {
      named.arrived = 0;
      named.generation++;
    } else if (in.operation == OP_BAR_SYNC) {
      warp.barrier = id;
      warp.generation = generation;
      return wait("barrier " + text(id));
    }
    return Next::ADVANCE;
  }

  Next transaction(const Instruction& in) {
    const u64 *a = input(in, 0), *b = input(in, 1);
    bool incomplete = false;
    each([&](int lane) {
      u64 address = a[lane] + in.offset;
      switch (in.operation) {
        case OP_MBAR_INIT: {
          shared(cta, address, 8, 8);
          Cta& target = owner(cta, address);
          target.mbarriers[address] = {0, (i64)(u32)b[lane], (i64)(u32)b[lane], 0};
          break;
        }
        case OP_MBAR_ARRIVE: arrive(cta, address, (u32)b[lane]); break;
        case OP_MBAR_EXPECT:
          mbarrier(cta, address).bytes += (u32)b[lane];
          arrive(cta, address, 1);
          break;
        default: {
          const bool done = mbarrier(cta, address).phase != (b[lane] & 1);
          output(in, 0)[lane] = done;
          if (!done) {
            incomplete = true;
            warp.reason = "mbarrier " + text(address) + " in phase " + text(b[lane] & 1);
          }
        }
      }
    });
    if (!incomplete) return Next::ADVANCE;
    // the program looks again in its next turn
    warp.looked = cluster.events;
    jump(group, (int)(&in - program.instructions.data()) + 1);
    warp.waiting |= group;
    return Next::JUMPED;
  }

  // ---- asynchronous copies ----

  static void perform(Cta& cta, const Copy& copy) {
    u8* target = shared(cta, copy.target, copy.size, copy.size);
    std::memset(target, 0, copy.size);
    if (!copy.read) return;
    if (copy.source % copy.size) stop("cp.async from an address that is not aligned to its size");
    std::memcpy(target, global(copy.source, copy.read, false), copy.read);
  }

  // Take the copies that `chosen` takes from those of the warp, in their order.
  template <class F>
  std::vector<Copy> taken(F chosen) {
    std::vector<Copy> result, rest;
    for (const Copy& copy : warp.copies) (chosen(copy) ? result : rest).push_back(copy);
    warp.copies = rest;
    return result;
  }

  std::vector<i32> coordinates(const Instruction& in, int first, int lane) const {
    std::vector<i32> at;
    for (int i = 0; i < in.mode; i++) at.push_back((i32)input(in, first + i)[lane]);
    return at;
  }

  Next copy(const Instruction& in) {
    Cta& own = cta;
    switch (in.operation) {
      case OP_CP_ASYNC:
        each([&](int lane) {
          const u64 target = input(in, 0)[lane] + in.offset, source = input(in, 1)[lane] + in.offset2;
          const int read = (int)(u32)input(in, 2)[lane];
          if (read > in.mode) stop("cp.async that reads more than it copies");
          const Copy copy{lane, target, source, (int)in.mode, read, warp.copy_groups[lane]};
          if (schedule.delay) warp.copies.push_back(copy);
          else perform(cta, copy);
        });
        break;
      case OP_CP_COMMIT: each([&](int lane) { warp.copy_groups[lane]++; }); break;
      case OP_CP_WAIT: {
        const auto old = [&](const Copy& copy) {
          return (mask >> copy.lane & 1) && copy.group < warp.copy_groups[copy.lane] - in.mode;
        };
        for (const Copy& copy : taken(old)) perform(cta, copy);
        break;
      }
      case OP_CP_ARRIVE: {
        const auto before = taken([&](const Copy& copy) { return mask >> copy.lane & 1; });
        std::vector<u64> barriers;
        each([&](int lane) { barriers.push_back(input(in, 0)[lane] + in.offset); });
        later(cta, [&own, before, barriers] {
          for (const Copy& copy : before) perform(own, copy);
          for (u64 address : barriers) arrive(own, address, 1);
        });
        break;
      }
      case OP_BULK_LOAD:
        each([&](int lane) {
          const u64 target = input(in, 0)[lane] + in.offset, source = input(in, 1)[lane] + in.offset2;
          const u64 bytes = (u32)input(in, 2)[lane], signal = input(in, 3)[lane];
          if (source % 16 || bytes % 16) stop("a bulk copy that is not aligned to 16 bytes");
          later(cta, [&own, target, source, bytes, signal] {
            std::memcpy(shared(own, target, bytes, 16), global(source, bytes, false), bytes);
            complete(own, signal, bytes);
          });
        });
        break;
      case OP_TMA_LOAD:
        each([&](int lane) {
          const u64 target = input(in, 0)[lane] + in.offset, signal = input(in, 1)[lane] + in.offset2;
          const u64 map = (u64)program.parameter_memory + input(in, 2)[lane];
          const auto at = coordinates(in, 3, lane);
          const u32 to = in.flags & MULTICAST ? (u16)input(in, 3 + in.mode)[lane] : 0;
          if (in.flags & MULTICAST && !to) stop("a multicast to no CTA");
          later(cta, [&own, target, signal, map, at, to] { tma_load(own, target, signal, map, at, to); });
        });
        break;
      case OP_TMA_STORE:
        each([&](int lane) {
          const u64 source = input(in, 0)[lane] + in.offset;
          const u64 map = (u64)program.parameter_memory + input(in, 1)[lane];
          const auto at = coordinates(in, 2, lane);
          Warp& issuer = warp;
          warp.stores++;
          later(cta, [&own, &issuer, source, map, at] {
            issuer.stores--;
            tma_store(own, source, map, at);
          });
        });
        break;
      // for all stores, however many groups may be left
      default: if (mask && warp.stores) return wait("stores");
    }
    return Next::ADVANCE;
  }

  // ---- tensor cores ----

  static double number(u64 value, int type) {
    return type == TYPE_S8 ? (double)(i8)value : (double)real(value, type);
  }

  // A of 16 rows from two or four registers, as all tensor core instructions have it.
  void from_registers(double (&a)[16][32], const Instruction& in, int first, int count, int bytes) const {
    const int per = 4 / bytes;
    for (int lane = 0; lane < LANES; lane++) {
      for (int r = 0; r < count; r++) {
        for (int h = 0; h < per; h++) {
          const u64 value = cut(input(in, first + r)[lane] >> 8 * bytes * h, bytes);
          a[lane / 4 + 8 * (r & 1)][lane % 4 * per + h + 4 * per * (r >> 1)] = number(value, in.type);
        }
      }
    }
  }

  // Write the rows of this warp of a b^T; sums are exact and rounded once, unlike those of a GPU.
  template <class F>
  void multiply(const Instruction& in, double (&a)[16][32], double (&b)[256][32], int depth, F before) const {
    for (int v = 0; v < in.mode / 2; v++) {
      std::array<u64, LANES> results;
      for (int lane = 0; lane < LANES; lane++) {
        const int row = lane / 4 + 8 * (v / 2 % 2), column = v / 4 * 8 + lane % 4 * 2 + v % 2;
        const u64 start = before(v, lane);
        double sum = in.type == TYPE_S8 ? (double)(i32)start : (double)real(start, TYPE_F32);
        for (int k = 0; k < depth; k++) sum += a[row][k] * b[column][k];
        results[lane] = in.type == TYPE_S8 ? (u64)(u32)(i32)sum : word((float)sum);
      }
      std::copy(results.begin(), results.end(), output(in, v));
    }
  }

  Next tensor_cores(const Instruction& in) {
    if (!together(ALL)) return wait("other lanes");
    if (group != ALL || mask != ALL) stop("a tensor core instruction without all lanes");
    switch (in.operation) {
      case OP_MMA: {
        // four, two and four registers of A, B and C, or half as many of A and B
        const int of_a = (int)(in.inputs - 4) / 3 * 2, bytes = width(in.type), per = 4 / bytes;
        double a[16][32], b[256][32];
        from_registers(a, in, 0, of_a, bytes);
        for (int lane = 0; lane < LANES; lane++) {
          for (int i = 0; i < of_a / 2 * per; i++) {
            const u64 part = cut(input(in, of_a + i / per)[lane] >> 8 * bytes * (i % per), bytes);
            b[lane / 4][lane % 4 * per + i % per + 4 * per * (i / per)] = number(part, in.type);
          }
        }
        multiply(in, a, b, 2 * per * of_a, [&](int v, int lane) { return input(in, of_a * 3 / 2 + v)[lane]; });
        return Next::ADVANCE;
      }
      case OP_WGMMA: {
        const u64 *scale = input(in, 0), *b = input(in, 1), *a = input(in, 2);
        for (int lane = 1; lane < LANES; lane++) {
          const bool same_a = in.flags & IN_REGISTERS || a[lane] == a[0];
          if (!same_a || b[lane] != b[0] || (scale[lane] & 1) != (scale[0] & 1)) {
            stop("lanes whose WGMMA operands differ");
          }
        }
        const Wgmma product{&in, warp.wgmma_groups, (scale[0] & 1) != 0, a[0], b[0]};
        if (schedule.late_wgmma) warp.wgmma.push_back(product);
        else finish(product);
        return Next::ADVANCE;
      }
      case OP_WGMMA_COMMIT: warp.wgmma_groups++; return Next::ADVANCE;
      default: return wait_for_wgmma(in);
    }
  }

  // WGMMA is of four warps: what one of them has waited for is complete for all.
  Next wait_for_wgmma(const Instruction& in) {
    if (!schedule.late_wgmma) return Next::ADVANCE;
    const int needed = warp.wgmma_groups - (int)in.mode, first = warp.id / 4 * 4;
    for (int i = first; i < first + 4; i++) {
      const Warp& other = cta.warps.at(i);
      if (other.alive && other.wgmma_groups < needed) return wait("other warps of its group");
    }
    for (int i = first; i < first + 4; i++) {
      Warp& other = cta.warps[i];
      while (!other.wgmma.empty() && other.wgmma.front().group < needed) {
        Turn(other, program).finish(other.wgmma.front());
        other.wgmma.erase(other.wgmma.begin());
        cluster.events++;
      }
    }
    return Next::ADVANCE;
  }
};

// ---- clusters ----

void start(Cta& cta, const Program& program, const u32 (&cluster_index)[3]) {
  const Launch& launch = *cta.cluster->launch;
  const u32 *block = launch.block, *size = launch.cluster;
  const u32 inside[3] = {cta.rank % size[0], cta.rank / size[0] % size[1], cta.rank / (size[0] * size[1])};
  for (int i = 0; i < 3; i++) cta.index[i] = cluster_index[i] * size[i] + inside[i];
  // NaN, and integers far out of range
  cta.shared.assign(SHARED_BASE + launch.shared, 0xff);
  cta.warps.resize(block[0] * block[1] * block[2] / LANES);
  for (u32 id = 0; id < cta.warps.size(); id++) {
    Warp& warp = cta.warps[id];
    warp.cta = &cta;
    warp.id = id;
    warp.registers.assign((size_t)program.registers * LANES, 0xdeadbeefdeadbeef);
    for (u32 lane = 0; lane < LANES; lane++) {
      const auto set = [&](int special, u32 value) { warp.registers[special * LANES + lane] = value; };
      const u32 thread = id * LANES + lane;
      const u32 at[3] = {thread % block[0], thread / block[0] % block[1], thread / (block[0] * block[1])};
      for (int i = 0; i < 3; i++) {
        set(SPECIAL_TID_X + i, at[i]);
        set(SPECIAL_NTID_X + i, block[i]);
        set(SPECIAL_CTAID_X + i, cta.index[i]);
        set(SPECIAL_NCTAID_X + i, launch.grid[i]);
        set(SPECIAL_CLUSTERID_X + i, cluster_index[i]);
        set(SPECIAL_NCLUSTERID_X + i, launch.grid[i] / size[i]);
        set(SPECIAL_CLUSTER_CTAID_X + i, inside[i]);
        set(SPECIAL_CLUSTER_NCTAID_X + i, size[i]);
      }
      set(SPECIAL_LANEID, lane);
      set(SPECIAL_WARPID, id);
      set(SPECIAL_CLUSTER_CTARANK, cta.rank);
      set(SPECIAL_CLUSTER_NCTARANK, size[0] * size[1] * size[2]);
      const u32 below = (1u << lane) - 1;
      set(SPECIAL_LANEMASK_EQ, 1u << lane);
      set(SPECIAL_LANEMASK_LT, below);
      set(SPECIAL_LANEMASK_LE, below | 1u << lane);
      set(SPECIAL_LANEMASK_GT, ~(below | 1u << lane));
      set(SPECIAL_LANEMASK_GE, ~below);
    }
  }
}

using Clusters = std::vector<std::unique_ptr<Cluster>>;

std::string place_of(const Cta& cta) {
  return "CTA " + text(cta.index[0]) + "," + text(cta.index[1]) + "," + text(cta.index[2]);
}

std::string hanging(const Clusters& clusters, const Program& program) {
  std::string said = "deadlock";
  for (const auto& cluster : clusters) {
    for (const Cta& cta : cluster->ctas) {
      for (const Warp& warp : cta.warps) {
        if (!warp.alive) continue;
        const int pc = warp.pc[std::countr_zero(warp.alive)];
        said += "\n  " + place_of(cta) + " warp " + text(warp.id) + " waits for " + warp.reason + " at line " +
                text(program.instructions[pc].line);
      }
    }
  }
  return said;
}

// Give each warp a turn, then run copies that are due; false if nothing happened.
bool run_round(const Clusters& clusters, const Program& program) {
  std::vector<Warp*> order;
  u64 events = 0, events_before = 0;
  for (const auto& cluster : clusters) {
    events_before += cluster->events;
    for (Cta& cta : cluster->ctas) {
      for (Warp& warp : cta.warps) order.push_back(&warp);
    }
  }
  bool moved = false;
  for (size_t i = order.size(); schedule.seed && i > 1; i--) std::swap(order[i - 1], order[draw(i)]);
  for (Warp* warp : order) {
    if (!warp->alive) continue;
    int count = 100'000;
    if (schedule.seed) {
      if (!draw(4)) continue;
      // short turns, and sometimes a warp runs far ahead
      count = 1 + (draw(8) ? draw(40) : draw(2000));
    }
    moved |= Turn(*warp, program).run(count);
  }
  for (const auto& cluster : clusters) {
    std::vector<Delayed> due, rest;
    for (Delayed& delayed : cluster->delayed) (--delayed.rounds > 0 ? rest : due).push_back(delayed);
    cluster->delayed = rest;
    for (Delayed& delayed : due) delayed.run();
    moved |= !due.empty() || !rest.empty();
    events += cluster->events;
  }
  return moved || events != events_before;
}

bool is_running(const Cluster& cluster) {
  for (const Cta& cta : cluster.ctas) {
    for (const Warp& warp : cta.warps) {
      if (warp.alive) return true;
    }
  }
  return false;
}

void check_end(const Cluster& cluster) {
  if (!cluster.delayed.empty()) stop("asynchronous copies outlive their CTA");
  for (const Cta& cta : cluster.ctas) {
    for (size_t i = 0; i < cta.barriers.size(); i++) {
      if (cta.barriers[i].arrived) stop("barrier " + text(i) + " is left with arrivals");
    }
    for (const Warp& warp : cta.warps) {
      if (!warp.wgmma.empty()) stop("WGMMA that no warp has waited for");
    }
  }
}

std::unique_ptr<Cluster> begin_cluster(const Program& program, const Launch& launch, const u32 (&index)[3]) {
  auto cluster = std::make_unique<Cluster>();
  cluster->launch = &launch;
  cluster->ctas.resize(launch.cluster[0] * launch.cluster[1] * launch.cluster[2]);
  for (u32 rank = 0; rank < cluster->ctas.size(); rank++) {
    Cta& cta = cluster->ctas[rank];
    cta.cluster = cluster.get();
    cta.rank = rank;
    start(cta, program, index);
    cluster->threads += cta.warps.size() * LANES;
  }
  return cluster;
}

void run_clusters(Clusters& resident, const Program& program, const Launch& launch, const u32 (&clusters)[3]) {
  const u64 count = (u64)clusters[0] * clusters[1] * clusters[2];
  const u32 most = schedule.seed ? 1 + draw(RESIDENT) : RESIDENT;
  int idle = 0;
  for (u64 next = 0; next < count || !resident.empty();) {
    while (next < count && resident.size() < most) {
      const u32 at[3] = {(u32)(next % clusters[0]), (u32)(next / clusters[0] % clusters[1]),
                         (u32)(next / clusters[0] / clusters[1])};
      resident.push_back(begin_cluster(program, launch, at));
      next++;
    }
    idle = run_round(resident, program) ? 0 : idle + 1;
    running = nullptr;
    if (idle > IDLE_ROUNDS) stop(hanging(resident, program));
    std::erase_if(resident, [](const auto& cluster) {
      if (is_running(*cluster)) return false;
      check_end(*cluster);
      return true;
    });
  }
}

void run_grid(const std::string& name, const Program& program, const Launch& launch) {
  u32 clusters[3];
  for (int i = 0; i < 3; i++) {
    if (launch.grid[i] % launch.cluster[i]) stop("a grid that is no multiple of its clusters");
    clusters[i] = launch.grid[i] / launch.cluster[i];
  }
  random_state = schedule.seed * 0x9e3779b97f4a7c15 + 0x1234567;
  Clusters resident;
  try {
    run_clusters(resident, program, launch, clusters);
  } catch (const Stop& error) {
    std::string said = name + ": " + error.what();
    if (running) {
      said += "\n  " + place_of(*running->cta) + " warp " + text(running->id) + " at line " + text(current->line);
    }
    running = nullptr;
    stop(said);
  }
}

}  // namespace

extern "C" {

// ---- for launch.py ----

void emulator_program(const char* name, const Instruction* instructions, i64 count, const i32* operands,
                      i64 operand_count, const u64* constants, i64 constant_count, int registers,
                      const u32* parameters, i64 parameter_count, i64 parameter_bytes) {
  Program& program = programs[name];
  program.instructions.assign(instructions, instructions + count);
  program.operands.assign(operands, operands + operand_count);
  program.registers = registers;
  for (i64 i = 0; i < constant_count; i++) program.constants.insert(program.constants.end(), LANES, constants[i]);
  for (i64 i = 0; i < parameter_count; i++) program.parameters.push_back({parameters[2 * i], parameters[2 * i + 1]});
  // tensor maps are aligned to 64 bytes
  program.memory.resize(parameter_bytes + 64);
  program.parameter_memory = program.memory.data() + (64 - (u64)program.memory.data() % 64) % 64;
}

// What comes before a launch: the schedule, and begin and end of all memory that the kernel may use.
void emulator_prepare(u64 seed, int late_wgmma, u32 delay, const u64* bounds, i64 count) {
  schedule = {seed, late_wgmma != 0, delay};
  allocations.clear();
  for (i64 i = 0; i < count; i++) allocations.push_back({bounds[2 * i], bounds[2 * i + 1]});
  failure.clear();
}

const char* emulator_failure() { return failure.c_str(); }

// ---- what host wrappers call ----

int cuda_dialect_init_library_once(void** handle, int (*init)(void**), int (*load)(void**, int), void*) {
  if (*handle) return 0;
  void* library = nullptr;
  if (int status = init(&library)) return status;
  if (int status = load(&library, 0)) return status;
  *handle = library;
  return 0;
}

void cuda_dialect_unload_library_once(void*) {}

int _cudaLibraryLoadData(void** library, const void*, ...) {
  *library = (void*)1;
  return 0;
}

int _cudaLibraryGetKernel(void** kernel, void*, const char* name) {
  const auto found = programs.find(name);
  if (found == programs.end()) {
    failure = std::string("no kernel ") + name;
    return 98;
  }
  *kernel = &*found;
  return 0;
}

int _cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}

int _cudaSetDevice(int) { return 0; }

int _cudaDeviceGetAttribute(int* value, int attribute, int) {
  // shared memory that a CTA can opt in to
  *value = attribute == 97 ? 232448 : 0;
  return 0;
}

int _cuKernelGetAttribute(int* value, int, void*, int) {
  *value = 0;
  return 0;
}

int _cudaFuncSetAttribute(void*, int, int) { return 0; }
int _cudaKernelSetAttributeForDevice(void*, int, int, int) { return 0; }

struct LaunchAttribute {
  int id, padding;
  union {
    u32 cluster[3];
    char bytes[64];
  };
};

struct LaunchConfiguration {
  u32 grid[3], block[3];
  size_t shared;
  void* stream;
  const LaunchAttribute* attributes;
  u32 count;
};

int _cudaLaunchKernelEx(const LaunchConfiguration* given, void* kernel, void** arguments) {
  auto& [name, program] = *(std::pair<const std::string, Program>*)kernel;
  Launch launch;
  std::copy_n(given->grid, 3, launch.grid);
  std::copy_n(given->block, 3, launch.block);
  launch.shared = (u32)given->shared;
  for (u32 i = 0; i < given->count; i++) {
    if (given->attributes[i].id == 4) std::copy_n(given->attributes[i].cluster, 3, launch.cluster);
  }
  for (size_t i = 0; i < program.parameters.size(); i++) {
    const auto [offset, size] = program.parameters[i];
    std::memcpy(program.parameter_memory + offset, arguments[i], size);
  }
  try {
    if (failure.empty()) run_grid(name, program, launch);
  } catch (const std::exception& error) {
    failure = error.what();
  }
  return 0;
}

void CuteDSLRT_TVMFFISetRaisedCudaError(int status) {
  if (failure.empty()) failure = "CUDA error " + text(status);
}

}  // extern "C"
