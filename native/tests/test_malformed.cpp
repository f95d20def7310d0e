// Damaged drafter files: each is refused with one of our exceptions, or loads and then drafts tokens of the vocabulary.
// The seed decides everything; a crash shows in the last line of the output which change caused it.
#include <cstdio>
#include <cstring>

#include "base/errors.h"
#include "check.h"
#include "drafter/drafter.h"
#include "tiny_drafter.h"

using namespace dspine;
using test::Gguf;
using test::TempFile;
using test::Tiny;

namespace {

constexpr uint32_t N_MUTATIONS = 500;
constexpr uint32_t NUMBERS[] = {0,  1,   2,   3,    7,     31,      32,         33,         63,        64,
                                65, 127, 128, 4096, 65536, 1 << 24, 0x7fffffff, 0x80000000, 0xffffffff};

class Mutator {
  public:
    explicit Mutator(uint32_t seed) : random_(seed) {}

    // Returns what was done; the result lies in `file`.
    std::string mutate(const TempFile & file) {
        const std::string what = below(2) == 0 ? change_parts(file) : change_bytes(file);
        return what;
    }

    size_t below(size_t n) { return random_() % n; }

  private:
    uint32_t number() { return NUMBERS[below(std::size(NUMBERS))]; }

    // A file that its writer meant, but that says something else.
    std::string change_parts(const TempFile & file) {
        constexpr ggml_type TYPES[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16,  GGML_TYPE_Q8_0,
                                       GGML_TYPE_Q4_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL};
        Gguf g = test::tiny_drafter(TYPES[below(std::size(TYPES))]);
        gguf_context * k = g.keys();
        const std::string key = gguf_get_key(k, static_cast<int64_t>(below(static_cast<size_t>(gguf_get_n_kv(k)))));
        const ggml_tensor * t = g.tensors()[below(g.tensors().size())];
        const std::string name = t->name;
        std::string what;
        switch (below(9)) {
            case 0:
                what = "a number for " + key;
                gguf_set_val_u32(k, key.c_str(), number());
                break;
            case 1:
                what = "a float for " + key;
                gguf_set_val_f32(k, key.c_str(),
                                 below(2) == 0 ? NAN : std::ldexp(1.0f, static_cast<int>(below(200)) - 100));
                break;
            case 2:
                what = "a string for " + key;
                gguf_set_val_str(k, key.c_str(), std::string(below(40), '\xc3').c_str());
                break;
            case 3: {
                what = "an array for " + key;
                const std::vector<int32_t> values(below(80), static_cast<int32_t>(number()));
                gguf_set_arr_data(k, key.c_str(), below(2) == 0 ? GGUF_TYPE_INT32 : GGUF_TYPE_FLOAT32, values.data(),
                                  values.size());
                break;
            }
            case 4: {
                what = "a pattern for " + key;
                const std::vector<int8_t> values(below(4), static_cast<int8_t>(below(3)));
                gguf_set_arr_data(k, key.c_str(), GGUF_TYPE_BOOL, values.data(), values.size());
                break;
            }
            case 5:
                what = "no " + key;
                gguf_remove_key(k, key.c_str());
                break;
            case 6: {
                const std::string other = g.tensors()[below(g.tensors().size())]->name;
                what = name + " and " + other + " swapped";
                g.rename(name, "held");
                if (other != name) {
                    g.rename(other, name);
                }
                g.rename("held", other);
                break;
            }
            case 7: {
                what = "another type for " + name;
                g.replace(name, TYPES[below(std::size(TYPES))], t->ne[0], t->ne[1]);
                break;
            }
            default: {
                what = "values that are not finite in " + name;
                auto * data = static_cast<char *>(g.find(name)->data);
                std::memset(data, below(2) == 0 ? 0xff : 0x7f, ggml_nbytes(t));
                break;
            }
        }
        g.write(file.path());
        return what;
    }

    // A file damaged in transport. Most damage goes to the header: there it does most.
    std::string change_bytes(const TempFile & file) {
        test::tiny_drafter().write(file.path());
        std::vector<char> bytes = file.read();
        const size_t n_header = GgufFile(file.path()).tensors().front().offset;
        const size_t n = below(4) == 0 ? bytes.size() : n_header;
        std::string what;
        switch (below(5)) {
            case 0: {
                what = "flipped bits";
                for (size_t i = 0, n_flips = 1 + below(8); i < n_flips; ++i) {
                    bytes[below(n)] ^= static_cast<char>(1u << below(8));
                }
                break;
            }
            case 1: {
                what = "other bytes";
                for (size_t i = 0, first = below(n), count = 1 + below(64); i < count && first + i < bytes.size();
                     ++i) {
                    bytes[first + i] = static_cast<char>(below(256));
                }
                break;
            }
            case 2: {
                what = "a cut tail";
                bytes.resize(below(n));
                break;
            }
            case 3: {
                what = "another number";
                const uint64_t value = below(4) == 0 ? uint64_t{number()} << 32 : number();
                std::memcpy(bytes.data() + below(n - 8), &value, below(2) == 0 ? 4 : 8);
                break;
            }
            default: {
                what = "bytes taken out or put in";
                const auto at = bytes.begin() + static_cast<long>(below(n - 64));
                if (below(2) == 0) {
                    bytes.erase(at, at + static_cast<long>(1 + below(64)));
                } else {
                    bytes.insert(at, 1 + below(64), static_cast<char>(below(256)));
                }
                break;
            }
        }
        file.write(bytes);
        return what;
    }

    std::mt19937 random_;
};

void commit_and_draft(Drafter & drafter) {
    const auto & c = drafter.config();
    const auto features = test::random_floats(static_cast<size_t>(7 * c.n_taps() * c.n_embd), 3);
    FeatureRows rows = {0, 7, {}, static_cast<size_t>(c.n_taps() * c.n_embd)};
    for (int64_t tap = 0; tap < c.n_taps(); ++tap) {
        rows.taps.push_back(features.data() + tap * c.n_embd);
    }
    drafter.commit({rows});
    CHECK_EQ(drafter.length(0), 7);
    for (const int32_t n_draft : {drafter.max_draft(), 1}) {
        const auto drafts = drafter.draft({{0, 5}}, n_draft);
        CHECK_EQ(drafts.size(), size_t{1});
        CHECK_EQ(drafts[0].tokens.size(), static_cast<size_t>(n_draft));
        for (const int32_t token : drafts[0].tokens) {
            CHECK(token >= 0 && token < Tiny::N_VOCAB);
        }
    }
}

}  // namespace

TEST(a_whole_file_drafts_on_every_cache_type_and_order) {
    const TempFile file("whole.gguf");
    test::tiny_drafter().write(file.path());
    for (const char * cache_type : {"f16", "f32", "q8_0"}) {
        for (const char * order : {"path", "full"}) {
            Drafter drafter(file.path(), test::tiny_target(), {1, 64, 1, cache_type, order});
            commit_and_draft(drafter);
        }
    }
}

TEST(damaged_files_are_refused_or_draft) {
    const TempFile file("damaged.gguf");
    const auto target = test::tiny_target();
    int n_loaded = 0;
    int n_refused = 0;
    for (uint32_t seed = 0; seed < N_MUTATIONS; ++seed) {
        Mutator mutator(seed);
        const std::string what = mutator.mutate(file);
        std::printf("%u: %s\n", seed, what.c_str());
        std::fflush(stdout);
        try {
            Drafter drafter(file.path(), target, {1, 64, 1, "f16", seed % 2 == 0 ? "path" : "full"});
            commit_and_draft(drafter);
            ++n_loaded;
        } catch (const Error & e) {
            std::printf("    %s\n", e.what());
            ++n_refused;
        } catch (const std::invalid_argument & e) {
            std::printf("    %s\n", e.what());
            ++n_refused;
        }
    }
    std::printf("%d loaded, %d refused\n", n_loaded, n_refused);
    CHECK(n_loaded > 50 && n_refused > 200);
}
