// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "qkvjit/qkvjit.h"
#include "qkvjit/safetensors.h"

int main() { std::puts(qkvjit::version()); }
