#include "worker/rpc/rank_connection.h"

#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <cerrno>

#include "absl/strings/str_cat.h"

namespace dflash {

absl::StatusOr<RankAddress> RankAddress::Parse(const std::string& text) {
  RankAddress address;
  if (text.rfind("unix:", 0) == 0) {
    address.unix_path = text.substr(5);
    // sockaddr_un holds 107 characters.
    if (address.unix_path.empty() || address.unix_path.size() > 107)
      return absl::InvalidArgumentError(absl::StrCat("no usable path of a socket: ", text));
    return address;
  }
  const size_t colon = text.rfind(':');
  if (text.rfind("tcp:", 0) != 0 || colon <= 4 || colon + 1 >= text.size())
    return absl::InvalidArgumentError(absl::StrCat("neither unix:PATH nor tcp:HOST:PORT: ", text));
  address.host = text.substr(4, colon - 4);
  address.port = text.substr(colon + 1);
  return address;
}

absl::Status RankConnection::CheckPeer() {
  ucred credentials = {};
  socklen_t size = sizeof(credentials);
  sockaddr_storage name = {};
  socklen_t name_size = sizeof(name);
  if (getsockname(socket_.native_handle(), reinterpret_cast<sockaddr*>(&name), &name_size) != 0 ||
      name.ss_family != AF_UNIX) {
    return absl::OkStatus();  // TCP: the group secret tells
  }
  if (getsockopt(socket_.native_handle(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0 ||
      credentials.uid != geteuid()) {
    return absl::UnauthenticatedError(
        absl::StrCat("the other end of the rank channel belongs to user ", credentials.uid));
  }
  return absl::OkStatus();
}

void RankConnection::Start(std::function<void(wire::RankFrame)> on_frame,
                           std::function<void(const absl::Status&)> on_end) {
  on_frame_ = std::move(on_frame);
  on_end_ = std::move(on_end);
  Read();
}

void RankConnection::Read() {
  absl::MutexLock lock(&mutex_);
  if (closed_) return;
  socket_.async_read_some(
      boost::asio::buffer(incoming_),
      [self = shared_from_this()](const boost::system::error_code& error, size_t bytes) {
        if (error) {
          return self->End(absl::UnavailableError(
              error == boost::asio::error::eof ? "the connection was closed"
                                               : absl::StrCat("the connection broke: ", error.message())));
        }
        self->reader_.Append({self->incoming_.data(), bytes});
        for (;;) {
          absl::StatusOr<std::optional<std::string>> body = self->reader_.Next();
          if (!body.ok()) return self->End(body.status());
          if (!body->has_value()) break;
          wire::RankFrame frame;
          if (!frame.ParseFromString(**body)) return self->End(absl::InvalidArgumentError("not a RankFrame"));
          if (self->on_frame_) self->on_frame_(std::move(frame));
        }
        self->Read();
      });
}

absl::Status RankConnection::Send(const wire::RankFrame& frame) {
  std::string body;
  if (!frame.SerializeToString(&body)) return absl::InternalError("a frame that cannot be serialized");
  absl::StatusOr<std::string> bytes = MakeFrame(body);
  if (!bytes.ok()) return bytes.status();
  absl::MutexLock lock(&mutex_);
  if (closing_ || closed_) return absl::UnavailableError("the connection is closed");
  size_t sent = 0;
  if (queue_.empty()) {
    // Straight from the calling thread: a plan reaches its rank without a detour over ours.
    const ssize_t written =
        ::send(socket_.native_handle(), bytes->data(), bytes->size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (written < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
      return absl::UnavailableError("the connection broke");  // the reader says so too
    sent = written > 0 ? static_cast<size_t>(written) : 0;
    if (sent == bytes->size()) return absl::OkStatus();
  }
  if (queued_bytes_ + bytes->size() > kMaxQueuedBytes)
    return absl::ResourceExhaustedError("the other rank does not read");
  queued_bytes_ += bytes->size() - sent;
  queue_.push_back(bytes->substr(sent));
  if (!writing_) {
    writing_ = true;
    boost::asio::post(*io_, [self = shared_from_this()] { self->WriteQueued(); });
  }
  return absl::OkStatus();
}

void RankConnection::WriteQueued() {
  absl::MutexLock lock(&mutex_);
  if (closed_) return;
  if (queue_.empty()) {
    writing_ = false;
    if (closing_) boost::asio::post(*io_, [self = shared_from_this()] { self->Close(true); });
    return;
  }
  boost::asio::async_write(socket_, boost::asio::buffer(queue_.front()),
                           [self = shared_from_this()](const boost::system::error_code& error, size_t) {
                             if (error) return;  // the reader says so
                             {
                               absl::MutexLock relock(&self->mutex_);
                               self->queued_bytes_ -= self->queue_.front().size();
                               self->queue_.pop_front();
                             }
                             self->WriteQueued();
                           });
}

void RankConnection::Close(bool now) {
  {
    absl::MutexLock lock(&mutex_);
    closing_ = true;
    if (!now && writing_) return;  // WriteQueued closes
  }
  boost::asio::post(*io_, [self = shared_from_this()] { self->End(absl::UnavailableError("closed here")); });
}

void RankConnection::End(const absl::Status& why) {
  {
    absl::MutexLock lock(&mutex_);
    if (closed_) return;
    closed_ = closing_ = true;
    boost::system::error_code ignored;
    socket_.close(ignored);
  }
  // The callbacks hold their owner: let go of it.
  const std::function<void(const absl::Status&)> on_end = std::exchange(on_end_, nullptr);
  if (on_end) on_end(why);
  boost::asio::post(*io_, [self = shared_from_this()] { self->on_frame_ = nullptr; });
}

}  // namespace dflash
