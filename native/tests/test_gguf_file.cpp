#include <functional>
#include <map>

#include "base/errors.h"
#include "check.h"
#include "gguf/gguf_file.h"
#include "tiny_drafter.h"

using namespace dspine;
using test::Gguf;
using test::TempFile;

namespace {

// A key of every GGUF type, named after it.
Gguf one_of_each() {
    Gguf g;
    gguf_context * k = g.keys();
    gguf_set_val_u8(k, "u8", 1);
    gguf_set_val_i8(k, "i8", -1);
    gguf_set_val_u16(k, "u16", 2);
    gguf_set_val_i16(k, "i16", -2);
    gguf_set_val_u32(k, "u32", 4000000000u);
    gguf_set_val_i32(k, "i32", -3);
    gguf_set_val_f32(k, "f32", 0.5f);
    gguf_set_val_u64(k, "u64", 4);
    gguf_set_val_i64(k, "i64", -4);
    gguf_set_val_f64(k, "f64", 0.25);
    gguf_set_val_bool(k, "bool", true);
    gguf_set_val_str(k, "str", "text");
    const int32_t numbers[] = {5, -6, 7};
    gguf_set_arr_data(k, "i32_array", GGUF_TYPE_INT32, numbers, 3);
    gguf_set_arr_data(k, "u32_array", GGUF_TYPE_UINT32, numbers, 3);
    gguf_set_arr_data(k, "empty_array", GGUF_TYPE_INT32, numbers, 0);
    const int8_t flags[] = {1, 0, 1, 1};
    gguf_set_arr_data(k, "bool_array", GGUF_TYPE_BOOL, flags, 4);
    const char * words[] = {"a", "", "ccc"};
    gguf_set_arr_str(k, "str_array", words, 3);
    g.add("first", GGML_TYPE_F32, 8, 3);
    g.add("second", GGML_TYPE_Q8_0, 64, 2);
    return g;
}

const std::vector<std::string> KEYS = {"u8",        "i8",        "u16",        "i16",      "u32",  "i32",
                                       "f32",       "u64",       "i64",        "f64",      "bool", "str",
                                       "i32_array", "u32_array", "bool_array", "str_array"};

}  // namespace

TEST(getters_return_what_was_written) {
    const TempFile file("types.gguf");
    one_of_each().write(file.path());
    const GgufFile f(file.path());
    CHECK_EQ(f.u32("u32"), 4000000000u);
    CHECK_EQ(f.f32("f32"), 0.5f);
    CHECK(f.boolean("bool"));
    CHECK_EQ(f.str("str"), "text");
    CHECK(f.i32_array("i32_array") == (std::vector<int32_t>{5, -6, 7}));
    CHECK(f.i32_array("empty_array").empty());
    CHECK(f.bool_array("bool_array") == (std::vector<bool>{true, false, true, true}));
    CHECK(f.str_array("str_array") == (std::vector<std::string>{"a", "", "ccc"}));
    CHECK_EQ(f.array_length("u32_array"), 3);
    CHECK(f.has("u8") && !f.has("u9"));
}

TEST(every_other_type_is_refused_by_name) {
    const TempFile file("types.gguf");
    one_of_each().write(file.path());
    const GgufFile f(file.path());
    const std::map<std::string, std::function<void(const std::string &)>> getters = {
        {"u32", [&](const std::string & key) { f.u32(key); }},
        {"f32", [&](const std::string & key) { f.f32(key); }},
        {"bool", [&](const std::string & key) { f.boolean(key); }},
        {"str", [&](const std::string & key) { f.str(key); }},
        {"i32_array", [&](const std::string & key) { f.i32_array(key); }},
        {"bool_array", [&](const std::string & key) { f.bool_array(key); }},
        {"str_array", [&](const std::string & key) { f.str_array(key); }},
    };
    for (const auto & [right, get] : getters) {
        for (const std::string & key : KEYS) {
            if (key != right) {
                CHECK_THROWS(ModelFormatError, "has key '" + key + "' of type ", get(key));
            }
        }
        CHECK_THROWS(ModelFormatError, "has no key 'absent'", get("absent"));
    }
    CHECK_THROWS(ModelFormatError, "of type u32, expected arr", f.array_length("u32"));
}

TEST(fallbacks_serve_missing_keys_only) {
    const TempFile file("types.gguf");
    one_of_each().write(file.path());
    const GgufFile f(file.path());
    CHECK_EQ(f.u32("absent", 9), 9u);
    CHECK_EQ(f.f32("absent", 1.5f), 1.5f);
    CHECK_EQ(f.str("absent", "none"), "none");
    CHECK_EQ(f.u32("u32", 9), 4000000000u);
    CHECK_THROWS(ModelFormatError, "has key 'i32' of type i32, expected u32", f.u32("i32", 9));
    CHECK_THROWS(ModelFormatError, "has key 'f64' of type f64, expected f32", f.f32("f64", 1.0f));
    CHECK_THROWS(ModelFormatError, "has key 'u8' of type u8, expected str", f.str("u8", ""));
}

TEST(tensors_are_described_and_read) {
    const TempFile file("tensors.gguf");
    Gguf g = one_of_each();
    g.write(file.path());
    const GgufFile f(file.path());
    CHECK_EQ(f.tensors().size(), size_t{2});
    CHECK(f.find_tensor("third") == nullptr);
    const GgufTensor * second = f.find_tensor("second");
    CHECK(second != nullptr);
    CHECK_EQ(second->type, GGML_TYPE_Q8_0);
    CHECK_EQ(second->n_dims, 2);
    CHECK_EQ(second->ne[0], 64);
    CHECK_EQ(second->ne[1], 2);
    CHECK_EQ(second->n_bytes, 2 * ggml_row_size(GGML_TYPE_Q8_0, 64));
    std::vector<char> bytes(second->n_bytes);
    f.read(*second, bytes.data());
    const char * written = static_cast<const char *>(g.find("second")->data);
    CHECK(bytes == std::vector<char>(written, written + bytes.size()));
}

TEST(every_cut_is_refused) {
    const TempFile whole("whole.gguf"), cut("cut.gguf");
    one_of_each().write(whole.path());
    const std::vector<char> bytes = whole.read();
    size_t n_used = 0;  // behind it there is only padding
    const GgufFile f(whole.path());
    for (const GgufTensor & t : f.tensors()) {
        n_used = std::max(n_used, t.offset + t.n_bytes);
    }
    for (size_t n = 0; n < n_used; ++n) {
        cut.write({bytes.begin(), bytes.begin() + static_cast<long>(n)});
        CHECK_THROWS(ModelFormatError, cut.path(), GgufFile(cut.path()));
    }
}

TEST(a_file_that_shrinks_after_opening_is_noticed) {
    const TempFile file("shrinks.gguf");
    one_of_each().write(file.path());
    const GgufFile f(file.path());
    std::vector<char> bytes = file.read();
    bytes.resize(f.find_tensor("second")->offset + 10);
    file.write(bytes);
    std::vector<char> out(f.find_tensor("second")->n_bytes);
    CHECK_THROWS(ModelFormatError, "could not be read at tensor 'second'",
                 f.read(*f.find_tensor("second"), out.data()));
}

TEST(paths_that_are_no_gguf_files) {
    CHECK_THROWS(FileNotFound, "no-such-file.gguf", GgufFile("/tmp/no-such-file.gguf"));
    CHECK_THROWS(ModelFormatError, "is not a regular file", GgufFile("/tmp"));
    CHECK_THROWS(ModelFormatError, "is not a regular file", GgufFile("/dev/zero"));
    const TempFile file("other.gguf");
    file.write({});
    CHECK_THROWS(ModelFormatError, "is not a readable GGUF file", GgufFile(file.path()));
    const std::string text = "{\"this\": \"is not a GGUF file, but long enough to look at\"}";
    file.write({text.begin(), text.end()});
    CHECK_THROWS(ModelFormatError, "invalid magic", GgufFile(file.path()));
}
