// All that the C++ tests need of a test framework: TEST registers a function, a failed CHECK ends it with file and
// line, main.cpp runs all tests of an executable, or those whose names contain its first argument.
#pragma once

#include <cmath>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace dspine::test {

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Case {
    const char * name;
    void (*run)();
};

inline std::vector<Case> & cases() {
    static std::vector<Case> all;
    return all;
}

inline bool add(const char * name, void (*run)()) {
    cases().push_back({name, run});
    return true;
}

[[noreturn]] inline void fail(const char * file, int line, const std::string & what) {
    throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

template <typename A, typename B>
void check_equal(const A & a, const B & b, const char * text, const char * file, int line) {
    if (!(a == b)) {
        std::ostringstream out;
        out << text << ": " << a << " is not " << b;
        fail(file, line, out.str());
    }
}

inline void check_near(double a, double b, double tolerance, const char * text, const char * file, int line) {
    if (!(std::fabs(a - b) <= tolerance)) {
        std::ostringstream out;
        out << text << ": " << a << " is not " << b << " +- " << tolerance;
        fail(file, line, out.str());
    }
}

// The call throws exactly `Error`, with a message that contains `text`.
template <typename Error, typename Call>
void check_throws(const Call & call, const std::string & text, const char * file, int line) {
    try {
        call();
    } catch (const Error & e) {
        if (std::string(e.what()).find(text) == std::string::npos) {
            fail(file, line, "expected a message with '" + text + "', got: " + e.what());
        }
        return;
    } catch (const std::exception & e) {
        fail(file, line, std::string("another exception: ") + e.what());
    }
    fail(file, line, "nothing was thrown, expected '" + text + "'");
}

}  // namespace dspine::test

#define TEST(name)                                                   \
    static void name();                                              \
    static const bool name##_added = dspine::test::add(#name, name); \
    static void name()

#define CHECK(condition) \
    ((condition) ? static_cast<void>(0) : dspine::test::fail(__FILE__, __LINE__, #condition " does not hold"))
#define CHECK_EQ(a, b) dspine::test::check_equal(a, b, #a, __FILE__, __LINE__)
#define CHECK_NEAR(a, b, tolerance) dspine::test::check_near(a, b, tolerance, #a, __FILE__, __LINE__)
#define CHECK_THROWS(error, text, ...) \
    dspine::test::check_throws<error>([&] { static_cast<void>(__VA_ARGS__); }, text, __FILE__, __LINE__)
