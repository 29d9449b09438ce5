# A room of the house: its own target, linked to the rooms below it and to nothing else.
#   tensorferry_room(NAME engines BELOW os base SOURCES a.cc LIBRARIES x TESTS a_test.cc)
function(tensorferry_room)
  cmake_parse_arguments(room "" "NAME" "BELOW;SOURCES;LIBRARIES;TESTS" ${ARGN})
  set(target tensorferry_${room_NAME})
  add_library(${target} OBJECT ${room_SOURCES})
  target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR}/include
                                              ${PROJECT_SOURCE_DIR}/src)
  list(TRANSFORM room_BELOW PREPEND tensorferry_ OUTPUT_VARIABLE below)
  target_link_libraries(${target} PUBLIC ${below} ${room_LIBRARIES} Threads::Threads
                        PRIVATE tensorferry_flags)
  set_property(GLOBAL APPEND PROPERTY tensorferry_rooms ${target})

  if(TENSORFERRY_TESTS AND room_TESTS)
    # Object libraries do not pass objects on, so a room's test names those below by itself.
    tensorferry_objects_of(objects ${target})
    add_executable(${room_NAME}_test ${room_TESTS})
    target_link_libraries(${room_NAME}_test PRIVATE ${objects} ${target} tensorferry_flags
                          GTest::gtest_main)
    gtest_discover_tests(${room_NAME}_test DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 300)
  endif()
endfunction()

# The object files of a room and of all rooms below it.
function(tensorferry_objects_of result target)
  set(all ${target})
  get_target_property(linked ${target} LINK_LIBRARIES)
  foreach(library IN LISTS linked)
    if(library MATCHES "^tensorferry_" AND NOT library STREQUAL "tensorferry_flags")
      get_target_property(type ${library} TYPE)
      if(type STREQUAL "OBJECT_LIBRARY")
        list(APPEND all ${library})
      endif()
    endif()
  endforeach()
  list(REMOVE_DUPLICATES all)
  list(TRANSFORM all REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>" OUTPUT_VARIABLE objects)
  set(${result} ${objects} PARENT_SCOPE)
endfunction()
