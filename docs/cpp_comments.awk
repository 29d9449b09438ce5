# Makes Doxygen's comments of the plain ones in the public headers. A comment above several functions
# counts for all of them. Left out: what is "For the library's own rooms." and inner namespaces.
function indent(line) { match(line, /[^ ]/); return RSTART }

NR == 1 { print "/// @file" }
own && /^ *(private|protected|public):|^\};/ { own = 0 }
/^ *\/\/ For the library's own rooms\./ { own = 1 }
own { print ""; next }

/^namespace tensorferry::/ { inner = "^}  // namespace tensorferry::" }
/^namespace (checkpoint|files|handle|memory|swap) / { inner = "^}" }
inner { if ($0 ~ inner) inner = ""; print ""; next }

/^$/ { comment = ""; trailing = 0 }
/^ *\/\/( |$)/ {
  if (trailing && indent($0) > 20) { sub(/\/\//, "///<"); print; next }
  if (described) comment = ""
  described = 0
  sub(/\/\//, "///")
  comment = comment $0 "\n"
  print
  next
}
{
  trailing = match($0, /; +\/\/ /)
  if (trailing) $0 = substr($0, 1, RSTART + RLENGTH - 4) "///< " substr($0, RSTART + RLENGTH)
  repeats = described && comment && !trailing && /\(/ && !/&&|operator|~/
  if (repeats && indent($0) == indent(comment)) print "/// As above."
  described = 1
  print
}
