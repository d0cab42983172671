# bundled_program(<target>): the program finds its libraries, and theirs, in lib/ beside it, so that tools/bundle can carry
# it to another machine. DT_RPATH, not DT_RUNPATH, which would not serve the libraries' own needs.
function(bundled_program target)
  set_target_properties(${target} PROPERTIES BUILD_RPATH "$ORIGIN/lib")
  target_link_options(${target} PRIVATE -Wl,--disable-new-dtags)
endfunction()
