#include <cstdio>
#include <cstring>

#include "base/log.h"
#include "check.h"

int main(int argc, char ** argv) {
    dspine::install_log_sink();
    int n_run = 0;
    int n_failed = 0;
    for (const dspine::test::Case & test : dspine::test::cases()) {
        if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) {
            continue;
        }
        ++n_run;
        try {
            test.run();
            std::printf("ok      %s\n", test.name);
        } catch (const std::exception & e) {
            ++n_failed;
            std::printf("FAILED  %s\n        %s\n", test.name, e.what());
        }
        std::fflush(stdout);
    }
    std::printf("%d of %d tests failed\n", n_failed, n_run);
    return n_failed > 0 || n_run == 0 ? 1 : 0;
}
