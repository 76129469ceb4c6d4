/* SPDX-License-Identifier: Apache-2.0 */
#ifndef REPLAYSSM_TESTS_CHECK_H
#define REPLAYSSM_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#include "replayssm/replayssm.h"

#define CHECK(condition)                                                                                               \
  do {                                                                                                                 \
    if (!(condition)) {                                                                                                \
      fprintf(stderr, "%s:%d: failed: %s (last error: %s)\n", __FILE__, __LINE__, #condition, replayssm_last_error()); \
      exit(1);                                                                                                         \
    }                                                                                                                  \
  } while (0)

void test_cursors(void);

#endif
