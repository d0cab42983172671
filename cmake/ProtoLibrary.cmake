# proto_library(<target> ROOT <dir> FILES a/v1/x.proto ...): generated messages and gRPC stubs as one library.
function(proto_library target)
  cmake_parse_arguments(A "" "ROOT" "FILES" ${ARGN})
  set(out ${CMAKE_CURRENT_BINARY_DIR}/gen)
  file(MAKE_DIRECTORY ${out})
  set(sources)
  foreach(file IN LISTS A_FILES)
    string(REGEX REPLACE "\\.proto$" "" stem ${file})
    set(generated ${out}/${stem}.pb.cc ${out}/${stem}.pb.h ${out}/${stem}.grpc.pb.cc ${out}/${stem}.grpc.pb.h)
    add_custom_command(OUTPUT ${generated}
      COMMAND protobuf::protoc -I ${A_ROOT} --cpp_out=${out} --grpc_out=${out}
              --plugin=protoc-gen-grpc=$<TARGET_FILE:gRPC::grpc_cpp_plugin> ${A_ROOT}/${file}
      DEPENDS ${A_ROOT}/${file} VERBATIM)
    list(APPEND sources ${generated})
  endforeach()
  add_library(${target} STATIC ${sources})
  target_compile_options(${target} PRIVATE -w)  # generated code
  target_include_directories(${target} SYSTEM PUBLIC ${out})
  target_link_libraries(${target} PUBLIC protobuf::libprotobuf gRPC::grpc++)
endfunction()
