#include "daemon/ops/ops_server.h"

#include <string>

#include <boost/asio.hpp>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dflash {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string Ask(int port, const std::string& request) {
  boost::asio::io_context context;
  boost::asio::ip::tcp::socket socket(context);
  socket.connect({boost::asio::ip::make_address("127.0.0.1"), static_cast<uint16_t>(port)});
  boost::system::error_code ended;
  boost::asio::write(socket, boost::asio::buffer(request), ended);  // a server that drops it may do so by now
  std::string answer;
  boost::asio::read(socket, boost::asio::dynamic_buffer(answer), ended);
  return answer;
}

std::string Get(const std::string& path, const char* method = "GET") {
  return std::string(method) + " " + path + " HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n";
}

OpsReply Handle(const OpsRequest& request) {
  if (request.path == "/livez") return {.body = "ok\n"};
  if (request.path == "/query") return {.body = request.query + "\n"};
  if (request.path == "/secret") {
    return request.authorization == "Bearer x" ? OpsReply{.body = "told\n"}
                                               : OpsReply{.status = 401, .body = ""};
  }
  return {.status = 404, .body = "no such page\n"};
}

TEST(OpsServerTest, AnswersGetAndHeadAndNothingElse) {
  auto server = OpsServer::Start("127.0.0.1:0", Handle);
  ASSERT_TRUE(server.ok()) << server.status();
  const int port = (*server)->port();
  EXPECT_THAT(Ask(port, Get("/livez?verbose")), AllOf(HasSubstr("200 OK"), HasSubstr("\r\n\r\nok\n")));
  EXPECT_THAT(Ask(port, Get("/livez", "HEAD")), AllOf(HasSubstr("200 OK"), Not(HasSubstr("\r\n\r\nok"))));
  EXPECT_THAT(Ask(port, Get("/query?verbose&x=1")), HasSubstr("\r\n\r\nverbose&x=1\n"));
  EXPECT_THAT(Ask(port, Get("/query")), HasSubstr("\r\n\r\n\n"));
  EXPECT_THAT(Ask(port, Get("/nothing")), HasSubstr("404 Not Found"));
  EXPECT_THAT(Ask(port, Get("/secret")),
              AllOf(HasSubstr("401 Unauthorized"), HasSubstr("WWW-Authenticate: Bearer")));
  EXPECT_THAT(Ask(port, "GET /secret HTTP/1.1\r\nAuthorization: Bearer x\r\nConnection: close\r\n\r\n"),
              HasSubstr("told\n"));
  EXPECT_THAT(Ask(port, Get("/livez", "DELETE")), HasSubstr("405 Method Not Allowed"));
}

TEST(OpsServerTest, DropsHeadersWithoutEnd) {
  auto server = OpsServer::Start("127.0.0.1:0", Handle);
  ASSERT_TRUE(server.ok());
  EXPECT_EQ(Ask((*server)->port(), "GET /livez HTTP/1.1\r\nX: " + std::string(100000, 'x')), "");
  EXPECT_THAT(Ask((*server)->port(), Get("/livez")), HasSubstr("200 OK"));
}

TEST(OpsServerTest, SaysWhatIsWrongWithAnAddress) {
  EXPECT_EQ(OpsServer::Start("nonsense", Handle).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(OpsServer::Start("127.0.0.1:99999", Handle).status().code(), absl::StatusCode::kInvalidArgument);
  auto server = OpsServer::Start("127.0.0.1:0", Handle);
  ASSERT_TRUE(server.ok());
  const std::string taken = "127.0.0.1:" + std::to_string((*server)->port());
  EXPECT_THAT(std::string(OpsServer::Start(taken, Handle).status().message()), HasSubstr(taken));
}

}  // namespace
}  // namespace dflash
