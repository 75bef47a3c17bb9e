#include "nodes/topology.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "base/env.hpp"
#include "base/process.hpp"
#include "base/text.hpp"
#include "core/greetings.hpp"
#include "unisono/error.hpp"
#include "unisono/version.hpp"

namespace unisono::nodes {
namespace {

constexpr int kMostRanks = 65536;         // of all nodes: a greeting each is gathered
constexpr std::size_t kMostLetters = 64;  // of a node's name: it is in every rank's greeting

std::string namespace_of(const char* kind) {
  struct stat found{};
  const std::string path = std::string("/proc/self/ns/") + kind;
  return ::stat(path.c_str(), &found) == 0 ? std::to_string(found.st_ino) : "";
}

// Containers of one machine differ in a namespace: their ranks share no memory.
std::string identity(const std::string& node) {
  const std::string& named = node.empty() ? env().node : node;
  if (named.size() > kMostLetters)
    throw UsageError("UNISONO_NODE=" + named.substr(0, 20) + "... is too long: name the node in " +
                     std::to_string(kMostLetters) + " letters.");
  return std::to_string(this_machine()) + "/" + (named.empty() ? "net " + namespace_of("net") : named);
}

// A rank's facts for the others, as text: every field is checked, since it comes from outside.
struct Greeting {
  std::string version;
  int rank = 0;
  bool check = false;
  std::uint64_t boot = 0;
  Cores cores;
  std::string node;

  std::string text() const {
    std::ostringstream out;
    out << "unisono " << version << ' ' << rank << ' ' << check << ' ' << boot;
    for (const std::uint64_t word : cores.words) out << ' ' << word;
    out << ' ' << node;
    return out.str();
  }
  static Greeting read(const std::string& text, int rank) {
    std::istringstream in(text);
    Greeting made;
    std::string magic;
    in >> magic >> made.version;
    if (magic != "unisono" || made.version != version_text(kHeaderVersion))
      throw UsageError("rank " + std::to_string(rank) + " runs " +
                       (magic == "unisono" ? "Unisono " + made.version.substr(0, 20)
                                           : "another program, or another version of Unisono") +
                       ", this rank Unisono " + version_text(kHeaderVersion) +
                       ": start every rank with the same version.");
    in >> made.rank >> made.check >> made.boot;
    for (std::uint64_t& word : made.cores.words) in >> word;
    in.get();
    std::getline(in, made.node, '\0');
    if (in.fail() || made.node.empty())
      throw UsageError(
          "rank " + std::to_string(rank) +
          " sent a greeting that cannot be read: start every rank with the same version of Unisono.");
    if (made.rank != rank)
      throw UsageError("two ranks are numbered " + std::to_string(made.rank) +
                       ": give each its own number below the size.");
    return made;
  }
};

}  // namespace

bool consecutive(const std::vector<int>& ranks) {
  return ranks.back() - ranks.front() + 1 == static_cast<int>(ranks.size());
}

Topology::Topology(int me, const std::vector<std::string>& names) : rank(me) {
  std::map<std::string, int> known;
  for (int r = 0; r < static_cast<int>(names.size()); ++r) {
    const auto [at, added] = known.emplace(names[static_cast<std::size_t>(r)], count());
    if (added) nodes.emplace_back();
    nodes[static_cast<std::size_t>(at->second)].push_back(r);
    node_of.push_back(at->second);
    if (r != rank) peers.push_back(r);
  }
  node = home_of(rank);
  local_rank = local_number(rank);
  for (int step = 1; step < count(); ++step) others.push_back((node + step) % count());
  in_order = std::all_of(nodes.begin(), nodes.end(), consecutive);
  together = consecutive(local());
  even = std::all_of(nodes.begin(), nodes.end(),
                     [&](const auto& ranks) { return ranks.size() == local().size(); });
}

int Topology::local_number(int of) const {
  const auto at = std::find(local().begin(), local().end(), of);
  return at == local().end() ? -1 : static_cast<int>(at - local().begin());
}

std::string Topology::who(int of) const {
  return "rank " + std::to_string(of) + " (node " + std::to_string(home_of(of)) + ")";
}

Topology meet(Bootstrap& bootstrap, const std::string& node, bool check) {
  Greeting mine{version_text(kHeaderVersion), bootstrap.rank(), check, this_boot(),
                Cores::of_this_process(),     identity(node)};
  const int size = bootstrap.size();
  check_rank(bootstrap.rank(), size, kMostRanks);
  if (size == 1) return {0, {mine.node}};
  const auto told = greet(bootstrap, mine.text());
  std::vector<std::string> names, checking;
  Cores cores;
  int here = 0;
  for (int r = 0; r < size; ++r) {
    const Greeting other = Greeting::read(told[static_cast<std::size_t>(r)], r);
    names.push_back(other.node);
    if (other.check) checking.push_back(std::to_string(r));
    if (other.boot != mine.boot) continue;
    ++here;
    cores.add(other.cores);
  }
  if (!checking.empty() && static_cast<int>(checking.size()) < size) {
    std::string who;
    for (const std::string& one : checking) who += (who.empty() ? "" : ", ") + one;
    throw UsageError("of all ranks only " + who +
                     " check their calls: give check=, or UNISONO_CHECK, the same on every rank.");
  }
  Topology place(bootstrap.rank(), names);
  place.crowded = here > cores.count();
  return place;
}

std::vector<std::string> NodeBootstrap::all_gather(const std::string& data) {
  const auto whole = whole_.all_gather(data);
  std::vector<std::string> mine;
  for (const int r : place_.local()) mine.push_back(whole.at(static_cast<std::size_t>(r)));
  return mine;
}

}  // namespace unisono::nodes
