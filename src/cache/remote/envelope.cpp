// SPDX-License-Identifier: Apache-2.0
#include "cache/remote/envelope.h"

#include <sodium.h>

#include <array>

namespace qkvjit::remote {
namespace {

constexpr std::string_view kMagic = "qkvjit\r\n";  // a transfer that rewrites line ends is seen at once
constexpr std::uint32_t kVersion = 1;
constexpr std::uint32_t kSha256 = 1, kHmacSha256 = 2;
constexpr std::size_t kHeadBytes = 24;

using Proof = std::array<unsigned char, crypto_hash_sha256_BYTES>;
static_assert(crypto_hash_sha256_BYTES == crypto_auth_hmacsha256_BYTES);
static_assert(kHeadBytes + sizeof(Proof) == kEnvelopeBytes);

template <typename Number>
void append(std::string& out, Number number) {
  for (std::size_t i = 0; i < sizeof(Number); ++i) out += static_cast<char>(number >> (8 * i) & 0xff);
}

template <typename Number>
Number read(std::string_view bytes) {
  Number number = 0;
  for (std::size_t i = 0; i < sizeof(Number); ++i) {
    number |= static_cast<Number>(static_cast<unsigned char>(bytes[i])) << (8 * i);
  }
  return number;
}

const unsigned char* data(std::string_view text) { return reinterpret_cast<const unsigned char*>(text.data()); }

Proof proof_of(std::string_view key, std::string_view head, std::string_view name, std::string_view entry) {
  Proof proof;
  if (key.empty()) {
    crypto_hash_sha256_state state;
    crypto_hash_sha256_init(&state);
    for (const std::string_view part : {head, name, entry}) crypto_hash_sha256_update(&state, data(part), part.size());
    crypto_hash_sha256_final(&state, proof.data());
  } else {
    crypto_auth_hmacsha256_state state;
    crypto_auth_hmacsha256_init(&state, data(key), key.size());
    for (const std::string_view part : {head, name, entry}) {
      crypto_auth_hmacsha256_update(&state, data(part), part.size());
    }
    crypto_auth_hmacsha256_final(&state, proof.data());
    sodium_memzero(&state, sizeof(state));
  }
  return proof;
}

}  // namespace

std::string seal(std::string_view key, std::string_view name, std::string_view entry) {
  std::string out;
  out.reserve(kEnvelopeBytes + entry.size());
  out += kMagic;
  append(out, kVersion);
  append(out, key.empty() ? kSha256 : kHmacSha256);
  append(out, static_cast<std::uint64_t>(entry.size()));
  const Proof proof = proof_of(key, out, name, entry);
  out.append(reinterpret_cast<const char*>(proof.data()), proof.size());
  out += entry;
  return out;
}

Verdict unseal(std::string_view key, std::string_view name, std::string_view sealed, std::string_view& entry) {
  if (sealed.size() < kEnvelopeBytes || !sealed.starts_with(kMagic)) return Verdict::not_ours;
  if (read<std::uint32_t>(sealed.substr(8)) != kVersion) return Verdict::not_ours;
  if (read<std::uint32_t>(sealed.substr(12)) != (key.empty() ? kSha256 : kHmacSha256)) return Verdict::other_proof;
  const std::string_view behind = sealed.substr(kEnvelopeBytes);
  if (read<std::uint64_t>(sealed.substr(16)) != behind.size()) return Verdict::forged;
  const Proof proof = proof_of(key, sealed.substr(0, kHeadBytes), name, behind);
  if (sodium_memcmp(proof.data(), sealed.data() + kHeadBytes, proof.size()) != 0) return Verdict::forged;
  entry = behind;
  return Verdict::good;
}

}  // namespace qkvjit::remote
