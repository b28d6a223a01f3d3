#include "engine/candidates.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <string_view>

namespace atoll_core::engine {
namespace {

struct Place {
  std::string host;
  std::uint16_t port = 0;
};

// False if what stands after the colon is no port.
bool read_port(std::string_view text, std::uint16_t* port) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *port);
  return error == std::errc() && end == text.data() + text.size();
}

bool read_place(std::string_view text, std::uint16_t port, Place* out) {
  out->port = port;
  if (text.starts_with('[')) {
    const std::size_t end = text.find(']');
    if (end == std::string_view::npos) return false;
    out->host = text.substr(1, end - 1);
    const std::string_view rest = text.substr(end + 1);
    return rest.empty() || (rest.starts_with(':') && read_port(rest.substr(1), &out->port));
  }
  const std::size_t colon = text.find(':');
  const bool has_port = colon != std::string_view::npos && text.rfind(':') == colon;
  out->host = has_port ? text.substr(0, colon) : text;
  return !has_port || read_port(text.substr(colon + 1), &out->port);
}

Status find(const std::string& text, std::uint16_t port, bool numeric_only,
            std::vector<Candidate>* out) {
  Place place;
  if (!read_place(text, port, &place))
    return {Kind::kSystem, "\"" + text + "\" has no port after the colon", EINVAL};
  std::vector<Address> found;
  if (Status s = resolve(place.host, place.port, numeric_only, &found); !s.ok()) return s;
  const std::string at_port = " port " + std::to_string(place.port);
  std::vector<Candidate> candidates;
  for (const Address& address : found) {
    const std::string number = host_text(address);
    const bool is_name = number != place.host && found.size() > 1;
    candidates.push_back({address, place.host + (is_name ? " (" + number + ")" : "") + at_port});
  }
  add_candidates(candidates, out);
  return success();
}

template <class F>
void for_each_host(const std::string& hosts, const F& call) {
  for (std::size_t begin = 0; begin <= hosts.size();) {
    const std::size_t end = std::min(hosts.find(',', begin), hosts.size());
    call(hosts.substr(begin, end - begin));
    begin = end + 1;
  }
}

}  // namespace

Status find_candidates(const std::string& hosts, std::uint16_t port, std::vector<Candidate>* out) {
  Status failure = {Kind::kSystem, "no address is given", EADDRNOTAVAIL};
  for_each_host(hosts, [&](const std::string& host) {
    if (Status s = find(host, port, false, out); !s.ok()) failure = std::move(s);
  });
  return out->empty() ? failure : success();
}

void numeric_candidates(const std::string& hosts, std::uint16_t port, std::vector<Candidate>* out,
                        std::vector<std::string>* others) {
  for_each_host(hosts, [&](const std::string& host) {
    if (!find(host, port, true, out).ok()) others->push_back(host);
  });
}

void add_candidates(const std::vector<Candidate>& found, std::vector<Candidate>* to) {
  for (const Candidate& each : found) {
    const bool known = std::ranges::find(*to, each.text, &Candidate::text) != to->end();
    if (!known && to->size() < kMostCandidates) to->push_back(each);
  }
}

}  // namespace atoll_core::engine
