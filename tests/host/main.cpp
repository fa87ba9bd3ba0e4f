// SPDX-License-Identifier: Apache-2.0
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdlib>

int main(int argc, char** argv) {
  // No disk cache but those that a test asks for, in the tools it runs neither.
  setenv("QKVJIT_CACHE_DIR", "", 1);
  return doctest::Context(argc, argv).run();
}
