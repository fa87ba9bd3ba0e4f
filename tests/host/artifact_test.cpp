// SPDX-License-Identifier: Apache-2.0
// What names a compiled kernel, and the bytes that keep it: every field counts, nothing damaged is taken.
#include <doctest/doctest.h>

#include <algorithm>
#include <set>
#include <string>
#include <variant>

#include "cache/artifact_entry.h"
#include "cache/artifact_key.h"
#include "compile/compiler.h"
#include "compile/kernel_templates.h"
#include "compile/name_expression.h"
#include "support/cache_fixture.h"
#include "support/sha256.h"

namespace {

using namespace qkvjit;
using fake::spec_of;

ArtifactKey key_of(const Specialization& spec) { return ArtifactKey::of(spec, *fake::nvrtc()); }

std::string fault_of(const std::string& bytes, const Specialization& spec) {
  const auto decoded = decode_entry(bytes, key_of(spec), spec);
  const auto* fault = std::get_if<EntryFault>(&decoded);
  return fault == nullptr ? std::string() : fault->reason;
}

/// With its checksum made anew, as a writer with a bug would.
std::string sealed(std::string bytes) {
  bytes.resize(bytes.size() - sizeof(Sha256));
  const Sha256 checksum = sha256(bytes);
  bytes.append(checksum.begin(), checksum.end());
  return bytes;
}

}  // namespace

TEST_SUITE("artifact") {
  TEST_CASE("every field of a specialisation changes the key, and no two keys are alike") {
    const Specialization base = spec_of();
    std::set<std::string> names{key_of(base).name()};
    std::size_t changes = 0;
    const auto changed = [&](auto change) {
      Specialization spec = base;
      change(spec);
      names.insert(key_of(spec).name());
      ++changes;
    };
    changed([](Specialization& s) { s.pipeline = Pipeline::decode; });
    changed([](Specialization& s) { s.layout = WeightLayout::nk8; });
    changed([](Specialization& s) { s.activation_dtype = DType::bf16; });
    changed([](Specialization& s) { s.scale_dtype = DType::f32; });
    changed([](Specialization& s) { s.n_q += 8; });
    changed([](Specialization& s) { s.n_k += 8; });
    changed([](Specialization& s) { s.n_v += 8; });
    changed([](Specialization& s) { s.k += 8; });
    changed([](Specialization& s) { s.group_size = 64; });
    changed([](Specialization& s) { s.aligned = !s.aligned; });
    changed([](Specialization& s) { s.tile.block_m += 1; });
    changed([](Specialization& s) { s.tile.block_n += 1; });
    changed([](Specialization& s) { s.tile.warps_m += 1; });
    changed([](Specialization& s) { s.tile.warps_n += 1; });
    changed([](Specialization& s) { s.tile.warps_k += 1; });
    changed([](Specialization& s) { s.tile.stages += 1; });
    changed([](Specialization& s) { s.tile.min_blocks += 1; });
    changed([](Specialization& s) { s.tile.block_k = 64; });
    changed([](Specialization& s) { s.tile.copy_warps += 1; });
    changed([](Specialization& s) { s.tile.cluster_k += 1; });
    changed([](Specialization& s) { s.tile.cluster_n += 1; });
    changed([](Specialization& s) { s.target.sm = 80; });
    changed([](Specialization& s) { s.target.suffix = 'a'; });
    std::size_t fields = 0;
    for_each_field(base, [&](std::string_view, auto) { ++fields; });
    CHECK(changes == fields);  // a new field needs a line above
    CHECK(names.size() == changes + 1);
  }

  TEST_CASE("the compiler's build, its options and the templates are in the key; its path is not") {
    const Specialization spec = spec_of();
    const ArtifactKey key = key_of(spec);
    CHECK(key.field("nvrtc") == "13.0.1");
    CHECK(key.field("templates") == templates_digest());
    CHECK(key.field("artifact") == "ptx+cubin");
    CHECK(key.field("target") == "sm_90");
    NvrtcTable other = *fake::nvrtc();
    other.path = "/elsewhere/libnvrtc.so.13";
    CHECK(ArtifactKey::of(spec, other).name() == key.name());
    other.build = "13.0.2";
    CHECK(ArtifactKey::of(spec, other).name() != key.name());
    // The template of another build of the library differs in one byte.
    std::string text = key.text();
    const std::size_t digest = text.find(templates_digest());
    REQUIRE(digest != std::string::npos);
    text[digest] = text[digest] == 'f' ? '0' : 'f';
    const auto changed = ArtifactKey::parse(text);
    REQUIRE(changed.has_value());
    CHECK(changed->name() != key.name());
    const auto differing = differences(*changed, key);
    REQUIRE(differing.size() == 1);
    CHECK(differing[0].name == "templates");
    CHECK(ArtifactKey::parse(key.text())->name() == key.name());
    CHECK(key.name() == to_hex(sha256(key.text())));
  }

  TEST_CASE("a compiler without a known build has no complete key") {
    NvrtcTable table = *fake::nvrtc();
    table.build.clear();
    table.path = "/nowhere/libnvrtc.so.13";
    CHECK_FALSE(ArtifactKey::of(spec_of(), table).is_complete());
    CHECK(key_of(spec_of()).is_complete());
  }

  TEST_CASE("the real compiler's build number is found in its file") {
    const std::string build = nvrtc_build(*open_nvrtc());
    CHECK(std::ranges::count(build, '.') == 2);
    CHECK(build.size() < 16);  // and not by the digest of the file
  }

  TEST_CASE("an include that is not embedded is found in every spelling") {
    CHECK(unknown_include(kernel_templates()).empty());
    const auto told = [](std::string_view text) {
      const TemplateFile files[] = {{"a.cuh", "int a;\n"}, {"b.cu", text}};
      return unknown_include(files);
    };
    CHECK(told("#include \"a.cuh\"\n#pragma once\nint include;\n").empty());
    CHECK(told("#include <cuda_fp16.h>").starts_with("b.cu includes <cuda_fp16.h>"));
    CHECK(told("int b;\n  #  include\t\"c.cuh\"\n").starts_with("b.cu includes \"c.cuh\""));
    CHECK_FALSE(told("#include <a.cuh>\n").empty());
    CHECK_FALSE(told("#include NAME\n").empty());
  }

  TEST_CASE("an entry gives back the kernel it was made of") {
    const Specialization spec = spec_of();
    CompiledKernel kernel = compile_kernel(*fake::nvrtc(), spec);
    kernel.ptx += std::string("\0behind a zero", 14);
    kernel.spill_bytes = 7;
    kernel.static_smem_bytes = 9;
    kernel.compile_ms = 12.25;
    const auto decoded = decode_entry(encode_entry(key_of(spec), kernel), key_of(spec), spec);
    REQUIRE(std::holds_alternative<CompiledKernel>(decoded));
    const auto& back = std::get<CompiledKernel>(decoded);
    CHECK(back.spec == spec);
    CHECK(back.lowered_name == kernel.lowered_name);
    CHECK(back.ptx == kernel.ptx);
    CHECK(back.cubin == kernel.cubin);
    CHECK(back.log == kernel.log);
    CHECK(back.options == kernel.options);
    CHECK(back.nvrtc_version == kernel.nvrtc_version);
    CHECK(back.compile_ms == kernel.compile_ms);
    CHECK(back.registers == 40);
    CHECK(back.spill_bytes == 7);
    CHECK(back.static_smem_bytes == 9);
  }

  TEST_CASE("no flipped bit, no cut and no longer entry is taken") {
    const Specialization spec = spec_of();
    const std::string bytes = encode_entry(key_of(spec), compile_kernel(*fake::nvrtc(), spec));
    CHECK(fault_of(bytes, spec).empty());
    for (std::size_t at = 0; at < bytes.size(); ++at) {
      std::string damaged = bytes;
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << at % 8));
      if (fault_of(damaged, spec).empty()) FAIL("a bit flipped in byte " << at);
      if (fault_of(bytes.substr(0, at), spec).empty()) FAIL("cut after " << at);
    }
    CHECK(fault_of(bytes + '\0', spec) == "checksum");
    CHECK(fault_of("", spec) == "too short");
    CHECK(fault_of(bytes, spec_of(72)) == "key");
  }

  TEST_CASE("lengths that lie are refused also where the checksum fits") {
    const Specialization spec = spec_of();
    const std::string bytes = encode_entry(key_of(spec), compile_kernel(*fake::nvrtc(), spec));
    const std::size_t end_of_key = 8 + 4 + 4 + key_of(spec).text().size();
    for (std::size_t at = end_of_key; at < bytes.size() - sizeof(Sha256); ++at) {
      std::string damaged = bytes;
      for (const char value : {'\0', '\x7f', '\xff'}) {
        damaged[at] = value;
        (void)fault_of(sealed(damaged), spec);  // taken or not: nothing is read past the end, nor a gigabyte reserved
      }
    }
    std::string damaged = bytes;
    damaged.replace(end_of_key, 4, "\xff\xff\xff\xff");  // the lowered name's length
    CHECK(fault_of(sealed(damaged), spec) == "content");
    CHECK(fault_of(sealed(bytes.substr(0, bytes.size() - 1)), spec) == "content");
  }
}
