// Runs a fuzzer's function over the files of the command line: the corpus as a test, without libFuzzer.
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    if (!file) {
      std::fprintf(stderr, "cannot read %s\n", argv[i]);
      return 1;
    }
    // Printed before, so that a crash names its input.
    std::printf("%s\n", argv[i]);
    std::fflush(stdout);
    const std::string input{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    // A copy of the exact size: reading past its end is an error that the sanitizers see.
    auto* bytes = new uint8_t[input.size()];
    for (size_t k = 0; k < input.size(); ++k) bytes[k] = static_cast<uint8_t>(input[k]);
    LLVMFuzzerTestOneInput(bytes, input.size());
    delete[] bytes;
  }
  std::printf("%d inputs\n", argc - 1);
  return argc > 1 ? 0 : 1;  // no corpus is a mistake
}
