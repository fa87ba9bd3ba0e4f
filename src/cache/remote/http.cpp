// SPDX-License-Identifier: Apache-2.0
// HTTP: GET and PUT of <prefix>/<name>. Flat, without folders by first digits: a server that makes no folders of its
// own (WebDAV answers 409) still serves, and a fleet has thousands of entries, not millions.
#include <curl/curl.h>
#include <fmt/format.h>

#include <mutex>
#include <utility>

#include "cache/remote/connection.h"
#include "qkvjit/error.h"

namespace qkvjit::remote {
namespace {

struct FreeHandle {
  void operator()(CURL* handle) const { curl_easy_cleanup(handle); }
};
struct FreeList {
  void operator()(curl_slist* list) const { curl_slist_free_all(list); }
};
using Headers = std::unique_ptr<curl_slist, FreeList>;

struct Body {
  std::string bytes;
  std::uint64_t limit = 0;
  bool is_too_large = false;
};

std::size_t take(char* data, std::size_t one, std::size_t count, void* to) {
  auto& body = *static_cast<Body*>(to);
  if (body.bytes.size() + one * count > body.limit) {
    body.is_too_large = true;
    return 0;  // ends the transfer
  }
  try {
    body.bytes.append(data, one * count);
  } catch (const std::bad_alloc&) {
    return 0;
  }
  return one * count;
}

void add(Headers& headers, const char* line) {
  if (curl_slist* longer = curl_slist_append(headers.get(), line); longer != nullptr) {
    (void)headers.release();
    headers.reset(longer);
  }
}

Outcome outcome_of(CURLcode code) {
  switch (code) {
    case CURLE_OPERATION_TIMEDOUT:
      return Outcome::timeout;
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_CONNECT:
    case CURLE_SEND_ERROR:
    case CURLE_RECV_ERROR:
    case CURLE_SSL_CONNECT_ERROR:
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
      return Outcome::unreachable;
    case CURLE_FILESIZE_EXCEEDED:
      return Outcome::too_large;
    default:
      return Outcome::bad_answer;  // half an answer, no HTTP at all …
  }
}

class HttpConnection final : public Connection {
 public:
  HttpConnection(const Url& url, const RemoteCacheOptions& options)
      : url_(url), bearer_token_(options.bearer_token), ca_file_(options.ca_file), handle_(curl_easy_init()) {}

  Answer get(std::string_view name, std::uint64_t limit, const Deadline& deadline) override {
    Body body;
    body.limit = limit;
    Answer answer = perform(name, nullptr, body, deadline);
    if (answer.outcome == Outcome::ok) answer.text = std::move(body.bytes);
    return answer;
  }

  Answer put(std::string_view name, std::string_view value, const Deadline& deadline) override {
    Body body;
    body.limit = 64 << 10;  // what a server has to say about it
    Answer answer = perform(name, &value, body, deadline);
    if (answer.outcome == Outcome::absent) {
      return {Outcome::server_error, "the server answers that the prefix does not exist"};
    }
    return answer;
  }

 private:
  Answer perform(std::string_view name, const std::string_view* value, Body& body, const Deadline& deadline) {
    CURL* const handle = handle_.get();
    if (handle == nullptr) return {Outcome::unreachable, "curl_easy_init failed"};
    const int left = deadline.milliseconds_left();
    if (left == 0) return {Outcome::timeout, "there was no time left to ask"};
    curl_easy_reset(handle);  // connections are kept
    const std::string address = fmt::format("{}/{}", url_.text(), name);
    char error[CURL_ERROR_SIZE] = "";
    curl_easy_setopt(handle, CURLOPT_URL, address.c_str());
    curl_easy_setopt(handle, CURLOPT_ERRORBUFFER, error);
    curl_easy_setopt(handle, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(handle, CURLOPT_TIMEOUT_MS, static_cast<long>(left));
    curl_easy_setopt(handle, CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(left));
    curl_easy_setopt(handle, CURLOPT_FOLLOWLOCATION, 0L);
    curl_easy_setopt(handle, CURLOPT_TCP_KEEPALIVE, 1L);
    curl_easy_setopt(handle, CURLOPT_WRITEFUNCTION, take);
    curl_easy_setopt(handle, CURLOPT_WRITEDATA, &body);
    curl_easy_setopt(handle, CURLOPT_MAXFILESIZE_LARGE, static_cast<curl_off_t>(body.limit));
    curl_easy_setopt(handle, CURLOPT_USERAGENT, "qkvjit");
#if LIBCURL_VERSION_NUM >= 0x075700
    curl_easy_setopt(handle, CURLOPT_QUICK_EXIT, 1L);  // else cleaning up waits for a name's lookup
#endif
    if (!ca_file_.empty()) curl_easy_setopt(handle, CURLOPT_CAINFO, ca_file_.c_str());
    Headers headers;
    if (!bearer_token_.empty()) {
      curl_easy_setopt(handle, CURLOPT_HTTPAUTH, CURLAUTH_BEARER);
      curl_easy_setopt(handle, CURLOPT_XOAUTH2_BEARER, bearer_token_.c_str());
    } else if (!url_.user.empty() || !url_.password.empty()) {
      curl_easy_setopt(handle, CURLOPT_HTTPAUTH, CURLAUTH_BASIC);
      curl_easy_setopt(handle, CURLOPT_USERNAME, url_.user.c_str());
      curl_easy_setopt(handle, CURLOPT_PASSWORD, url_.password.c_str());
    }
    if (value != nullptr) {
      curl_easy_setopt(handle, CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(value->size()));
      curl_easy_setopt(handle, CURLOPT_POSTFIELDS, value->data());
      curl_easy_setopt(handle, CURLOPT_CUSTOMREQUEST, "PUT");
      add(headers, "Content-Type: application/octet-stream");
      add(headers, "Expect:");  // curl would wait a second for a server that does not know 100-continue
      curl_easy_setopt(handle, CURLOPT_HTTPHEADER, headers.get());
    }
    const CURLcode code = curl_easy_perform(handle);
    if (body.is_too_large) return {Outcome::too_large, fmt::format("more than {} bytes", body.limit)};
    long status = 0;
    curl_easy_getinfo(handle, CURLINFO_RESPONSE_CODE, &status);
    curl_easy_setopt(handle, CURLOPT_ERRORBUFFER, nullptr);
    // Only an answer that was good so far can be cut short or too large.
    if (code != CURLE_OK) return {outcome_of(code), *error != '\0' ? quoted(error) : curl_easy_strerror(code)};
    return answer_of(status, value != nullptr);
  }

  static Answer answer_of(long status, bool is_put) {
    const auto says = [status](const char* meaning) { return fmt::format("HTTP status {}{}", status, meaning); };
    if (status == 200 || (is_put && (status == 201 || status == 204))) return {};
    if (status == 404 || status == 410) return {Outcome::absent, {}};
    if (status == 401 || status == 403 || status == 407) return {Outcome::denied, says("")};
    if (status == 413) return {Outcome::server_error, says(": the server takes no entry of this size")};
    if (status >= 300 && status < 400) return {Outcome::bad_answer, says(": redirects are not followed")};
    if (status >= 400) return {Outcome::server_error, says("")};
    return {Outcome::bad_answer, says(" was not expected")};
  }

  const Url url_;
  const std::string bearer_token_;
  const std::string ca_file_;
  const std::unique_ptr<CURL, FreeHandle> handle_;
};

}  // namespace

Connect http_connections(const Url& url, const RemoteCacheOptions& options) {
  static std::once_flag once;
  static CURLcode initialised = CURLE_OK;
  std::call_once(once, [] { initialised = curl_global_init(CURL_GLOBAL_DEFAULT); });
  if (initialised != CURLE_OK)
    throw Error(fmt::format("Remote cache: libcurl says {}", curl_easy_strerror(initialised)));
  return [url, options] { return std::make_unique<HttpConnection>(url, options); };
}

}  // namespace qkvjit::remote
