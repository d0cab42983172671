// One connection of the rank channel: frames in and out of a socket.
#pragma once

#include <utility>  // before Asio of Boost 1.74

#include <array>
#include <atomic>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "dflash/worker/v1/rank.pb.h"
#include "worker/rpc/frame_reader.h"

namespace dflash {

namespace wire = ::dflash::worker::v1;
using RankSocket = boost::asio::generic::stream_protocol::socket;

// Where the leader listens.
struct RankAddress {
  std::string unix_path;   // or
  std::string host, port;  // TCP
  bool is_tcp() const { return unix_path.empty(); }
  // "unix:PATH" or "tcp:HOST:PORT"; InvalidArgument naming it.
  static absl::StatusOr<RankAddress> Parse(const std::string& text);
};

// Callbacks run on the io_context's one thread; Send and Close may be called from any thread.
class RankConnection : public std::enable_shared_from_this<RankConnection> {
 public:
  RankConnection(RankSocket socket, boost::asio::io_context* io) : io_(io), socket_(std::move(socket)) {}

  // Unauthenticated unless the process at the other end of a Unix socket belongs to our user.
  absl::Status CheckPeer();
  // Longest frame that is read from now on; io thread or before Start.
  void set_frame_limit(size_t bytes) { reader_.set_limit(bytes); }
  // Starts to read. `on_end` is the last call, once: the error, or Unavailable when the peer has closed.
  void Start(std::function<void(wire::RankFrame)> on_frame, std::function<void(const absl::Status&)> on_end);
  // Writes what the socket takes at once and queues the rest. Unavailable: closed. ResourceExhausted: too
  // large, or the peer has not read for long.
  absl::Status Send(const wire::RankFrame& frame);
  // Ends it when what has been sent is on its way; at once with `now`.
  void Close(bool now);

 private:
  void Read();
  void WriteQueued();
  void End(const absl::Status& why);

  static constexpr size_t kMaxQueuedBytes = size_t{64} << 20;
  boost::asio::io_context* const io_;
  std::function<void(wire::RankFrame)> on_frame_;    // io thread
  std::function<void(const absl::Status&)> on_end_;  // io thread
  FrameReader reader_;                               // io thread
  std::array<char, 65536> incoming_;                 // io thread
  absl::Mutex mutex_;
  RankSocket socket_;  // closed under the mutex, on the io thread
  std::deque<std::string> queue_ ABSL_GUARDED_BY(mutex_);
  size_t queued_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;  // the io thread works on the front of the queue
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;  // nothing more may be sent
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace dflash
