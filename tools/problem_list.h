// SPDX-License-Identifier: Apache-2.0
// problems.json: for which problems kernels are made ahead. A list, or an object with the list under "problems"; an
// item is one of
//
//   {"n_q": 4096, "n_k": 1024, "n_v": 1024, "k": 4096}      a shape, or
//   {"model": "llama-3-8b", "tp": 2}                        one rank of a model that qkvjit-bench knows; tp is 1 if
//   absent
//
// and may have "layout" ("k8n", the default, "nk8" or "prepacked", or a list of them), "group_size" (128),
// "activation_dtype" and "scale_dtype" ("f16"). Pure.
#pragma once

#include <string>
#include <vector>

#include "qkvjit/select.h"

namespace qkvjit::tools {

/// The problems of a list, one for each layout. Throws InvalidProblem: "`name`: problems[2].n_q: got …, needs …".
std::vector<QkvProblem> parse_problem_list(const std::string& name, const std::string& text);

/// As above, from a file.
std::vector<QkvProblem> read_problem_list(const std::string& path);

/// Every kernel that `problems` can need on GPUs of the given targets (needed_specializations()), each once. A GPU with
/// another number of multiprocessors than is typical of its kind may choose other tiles: `multiprocessors` says how
/// many (0: the typical number).
std::vector<Specialization> specializations_for(const std::vector<QkvProblem>& problems,
                                                const std::vector<Target>& targets, int multiprocessors = 0);
/// The same of a file's problems and of targets by name.
std::vector<Specialization> read_specializations(const std::string& path, const std::vector<std::string>& targets,
                                                 int multiprocessors = 0);

}  // namespace qkvjit::tools
