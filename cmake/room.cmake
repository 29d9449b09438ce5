# Compiles the files of a target twelve at a time, in a third of the time: most of it goes into
# headers and templates that they share. Files that are joined must not give one name to two things.
# The presets that look closer compile each file alone, and so find a missing #include.
function(tensorferry_join target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${TENSORFERRY_JOIN}
                        UNITY_BUILD_BATCH_SIZE 12)
endfunction()

# A room of the house: its own target, linked to the rooms below it and to nothing else. Rooms are
# object libraries, whose objects reach only those who link them by name.
#   tensorferry_room(NAME engines BELOW os base SOURCES a.cc LIBRARIES x TESTS a_test.cc)
# One that is OUTSIDE is no part of the library; it uses it as everybody does, by its public API.
function(tensorferry_room)
  cmake_parse_arguments(room "OUTSIDE" "NAME" "BELOW;SOURCES;LIBRARIES;TESTS" ${ARGN})
  set(target tensorferry_${room_NAME})
  add_library(${target} OBJECT ${room_SOURCES})
  target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR}/include
                                              ${PROJECT_SOURCE_DIR}/src)
  list(TRANSFORM room_BELOW PREPEND tensorferry_ OUTPUT_VARIABLE below)
  target_link_libraries(${target} PUBLIC ${below} ${room_LIBRARIES} Threads::Threads
                        PRIVATE tensorferry_flags)
  tensorferry_join(${target})
  if(TENSORFERRY_FUZZERS)  # which see by this how far an input gets
    target_compile_options(${target} PRIVATE -fsanitize=fuzzer-no-link)
  endif()
  if(room_OUTSIDE)
    target_link_libraries(${target} PUBLIC tensorferry::static)
  else()
    set_property(GLOBAL APPEND PROPERTY tensorferry_rooms ${target})
  endif()

  if(TENSORFERRY_TESTS AND room_TESTS)
    add_executable(${room_NAME}_test ${room_TESTS})
    tensorferry_join(${room_NAME}_test)
    target_link_libraries(${room_NAME}_test PRIVATE ${target} ${below} tensorferry_flags
                          tensorferry_cold_flags tensorferry_test_support GTest::gtest_main)
    gtest_discover_tests(${room_NAME}_test DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 300)
  endif()
endfunction()
