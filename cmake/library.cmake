# The shared and the static library, made of all rooms, and their installation.
get_property(rooms GLOBAL PROPERTY tensorferry_rooms)
list(TRANSFORM rooms REPLACE "(.+)" "$<TARGET_OBJECTS:\\1>" OUTPUT_VARIABLE objects)

add_library(tensorferry SHARED ${objects})
# Binaries fit the minor version they were built with: a new one may add fields to public structs.
set_target_properties(tensorferry PROPERTIES VERSION ${PROJECT_VERSION}
                      SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
target_link_libraries(tensorferry PRIVATE ${LIBURING} ${LIBAIO} Threads::Threads)
set(exports ${PROJECT_BINARY_DIR}/exports.map)
configure_file(cmake/exports.map.in ${exports} @ONLY)
target_link_options(tensorferry PRIVATE -Wl,--version-script=${exports})
if(NOT TENSORFERRY_SANITIZE)  # clang leaves a sanitizer's runtime to the program
  target_link_options(tensorferry PRIVATE -Wl,--no-undefined)
endif()
set_target_properties(tensorferry PROPERTIES LINK_DEPENDS ${exports})

add_library(tensorferry_static STATIC ${objects})
set_target_properties(tensorferry_static PROPERTIES OUTPUT_NAME tensorferry EXPORT_NAME static)
# The archives by name: liburing's shared library does not have all that we call.
target_link_libraries(tensorferry_static INTERFACE -l:liburing.a -l:libaio.a Threads::Threads)

foreach(library tensorferry tensorferry_static)
  target_include_directories(${library} INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                                  $<INSTALL_INTERFACE:include>)
  target_compile_features(${library} INTERFACE cxx_std_20)
endforeach()
add_library(tensorferry::tensorferry ALIAS tensorferry)
add_library(tensorferry::static ALIAS tensorferry_static)

include(CMakePackageConfigHelpers)
set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tensorferry)
configure_package_config_file(cmake/tensorferryConfig.cmake.in tensorferryConfig.cmake
                              INSTALL_DESTINATION ${config_dir})
write_basic_package_version_file(tensorferryConfigVersion.cmake COMPATIBILITY SameMinorVersion)
file(RELATIVE_PATH to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/tensorferry.pc.in tensorferry.pc @ONLY)

install(TARGETS tensorferry tensorferry_static EXPORT tensorferryTargets)
install(EXPORT tensorferryTargets NAMESPACE tensorferry:: DESTINATION ${config_dir})
install(DIRECTORY include/tensorferry DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_BINARY_DIR}/tensorferryConfig.cmake
              ${PROJECT_BINARY_DIR}/tensorferryConfigVersion.cmake DESTINATION ${config_dir})
install(FILES ${PROJECT_BINARY_DIR}/tensorferry.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
