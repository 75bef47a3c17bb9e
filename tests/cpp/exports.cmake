# cmake -DNM=... -DLIBRARY=... -DEXPECTED=... -P exports.cmake
# Compares the exports with the checked list, except weak functions: destructors of the error classes, which
# are inline and whose number the compiler decides.
execute_process(COMMAND ${NM} -DC --defined-only ${LIBRARY} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[0-9a-f]+ [^W] [^\n]+" symbols "${symbols}")
list(TRANSFORM symbols REPLACE "^[0-9a-f]+ . " "")
file(STRINGS ${EXPECTED} expected)
set(added ${symbols})
list(REMOVE_ITEM added ${expected})
set(missing ${expected})
list(REMOVE_ITEM missing ${symbols})
list(REMOVE_DUPLICATES added)
if(added OR missing)
  list(JOIN added "\n  " added)
  list(JOIN missing "\n  " missing)
  message(FATAL_ERROR "The exports of ${LIBRARY} are not those of ${EXPECTED}: mark what is public with UNISONO_API, "
    "and change the list.\nOnly in the library:\n  ${added}\nOnly in the list:\n  ${missing}")
endif()
