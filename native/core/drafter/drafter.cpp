#include "drafter/drafter.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "base/check.h"
#include "base/devices.h"
#include "base/errors.h"
#include "drafter/tensor_io.h"
#include "gguf/quantize.h"

namespace dspine {
namespace {

constexpr int32_t COMMIT_CHUNK = 512;   // rows of one commit graph
constexpr size_t MAX_GRAPHS = 32;       // kept ready, of each kind
constexpr int32_t MAX_SEQUENCES = 256;  // as llama.cpp's

// Nothing is computed: another look at the same bytes.
bool is_view(const ggml_tensor * node) {
    return node->op == GGML_OP_VIEW || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_PERMUTE ||
           node->op == GGML_OP_TRANSPOSE || node->op == GGML_OP_NONE;
}

// The operand whose type decides whether a device can: weights, a cache.
const ggml_tensor * main_operand(const ggml_tensor * node) {
    switch (node->op) {
        case GGML_OP_FLASH_ATTN_EXT: return node->src[1];
        case GGML_OP_SET_ROWS: return node;
        default: return node->src[0];
    }
}

TransitionOrder parse_order(const std::string & name, bool is_cpu) {
    if (name == "auto") {
        return is_cpu ? TransitionOrder::path : TransitionOrder::full;
    }
    if (name == "path" && !is_cpu) {
        throw std::invalid_argument("the transition order 'path' runs on CPU devices only, expected 'full' or 'auto'");
    }
    if (name == "path" || name == "full") {
        return name == "path" ? TransitionOrder::path : TransitionOrder::full;
    }
    throw std::invalid_argument("unknown transition order '" + name + "', expected auto, path or full");
}

}  // namespace

Drafter::Drafter(const std::string & path, std::shared_ptr<const TargetTensors> target, const DrafterOptions & options)
    : target_(std::move(target)) {
    need_range("n_seq", options.n_seq, 1, MAX_SEQUENCES);
    need_range("n_ctx", options.n_ctx, 1, MAX_POSITIONS);
    need_range("n_threads", options.n_threads, 0, MAX_THREADS);
    const ggml_type cache_type = parse_type(options.cache_type);
    const GgufFile file(path);
    config_ = DrafterConfig::read(file);
    check_pairing(path);
    ggml_backend_dev_t device = options.device.empty() ? local_device(target_->device) : find_device(options.device);
    backend_ = start_backend(device, options.n_threads);
    backend_.planned = target_->planned;
    order_ = parse_order(options.order, backend_.is_cpu);
    if (config_.injection && target_->output_rows == nullptr) {
        throw BackendError("the rows of the target's output matrix cannot be read on device '" + backend_.name() + "'");
    }
    weights_ = load_weights(file, config_, backend_);
    target_ = on_backend(std::move(target_), backend_);
    cache_ = std::make_unique<DrafterCache>(config_, backend_, options.n_seq, options.n_ctx, cache_type);

    mask_ctx_ = make_context(1);
    mask_embd_ = ggml_new_tensor_1d(mask_ctx_.get(), GGML_TYPE_F32, config_.n_embd);
    mask_buffer_ = allocate(mask_ctx_.get(), backend_, "the mask embedding");
    if (!backend_.planned) {
        std::vector<float> mask(static_cast<size_t>(config_.n_embd));
        RowReader(target_->token_embd).read(config_.mask_token, mask.data());
        upload(mask_embd_, mask);
    }

    allocator_.reset(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend_.get())));
    // The largest block once: unsupported operations and missing memory show now, and the buffer never grows later.
    const DraftGraph largest = build_draft_graph(parts(), largest_shape());
    const CommitGraph longest = build_commit_graph(parts(), std::min(COMMIT_CHUNK, options.n_ctx));
    allocate_graph(longest.graph);
    allocate_graph(largest.graph);
}

DraftShape Drafter::largest_shape() const {
    std::vector<BlockRequest> blocks;
    for (int32_t seq = 0; seq < cache_->n_seq(); ++seq) {
        blocks.push_back({seq, 0});
    }
    DraftShape shape = shape_for(blocks, config_.max_draft(), false);
    for (const LayerKind kind : {LayerKind::full, LayerKind::sliding}) {
        for (int64_t & n_kv : shape.n_kv[static_cast<int>(kind)]) {
            n_kv = cache_->n_cells(kind);
        }
    }
    return shape;
}

std::vector<OperationUse> Drafter::operations(const std::string & name) const {
    ggml_backend_dev_t device = find_device(name);
    DrafterParts there = parts();
    there.is_cpu = is_cpu(device);
    DraftShape shape = largest_shape();
    shape.order = parse_order("auto", there.is_cpu);
    const DraftGraph draft = build_draft_graph(there, shape);
    const CommitGraph commit = build_commit_graph(there, std::min(COMMIT_CHUNK, cache_->n_ctx()));
    std::map<std::pair<std::string, std::string>, OperationUse> found;
    for (ggml_cgraph * graph : {draft.graph, commit.graph}) {
        for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
            const ggml_tensor * node = ggml_graph_node(graph, i);
            if (is_view(node)) {
                continue;
            }
            const ggml_tensor * operand = main_operand(node);
            const std::string type = operand ? ggml_type_name(operand->type) : "";
            const std::string op = ggml_op_desc(node);
            OperationUse & use = found.try_emplace({op, type}, OperationUse{op, type, 0, true}).first->second;
            ++use.n_nodes;
            use.supported = use.supported && ggml_backend_dev_supports_op(device, node);
        }
    }
    std::vector<OperationUse> all;
    for (auto & [key, use] : found) {
        all.push_back(std::move(use));
    }
    return all;
}

DrafterParts Drafter::parts() const {
    return {config_, weights_, *cache_, *target_, mask_embd_, backend_.is_cpu};
}

void Drafter::check_pairing(const std::string & path) const {
    const auto refuse = [&](const std::string & what, int64_t drafter, int64_t target) {
        throw PairingError("drafter '" + path + "' was made for a target with " + what + " " + std::to_string(drafter) +
                           ", this target has " + std::to_string(target));
    };
    if (config_.n_embd != target_->n_embd) {
        refuse("width", config_.n_embd, target_->n_embd);
    }
    if (config_.n_vocab != target_->n_vocab) {
        refuse("vocabulary size", config_.n_vocab, target_->n_vocab);
    }
    if (target_->n_layer > 0 && config_.target_n_layer != target_->n_layer) {
        refuse("layer count", config_.target_n_layer, target_->n_layer);
    }
    if (!target_->arch.empty() && !config_.target_arch.empty() && config_.target_arch != target_->arch) {
        throw PairingError("drafter '" + path + "' was made for a target of architecture '" + config_.target_arch +
                           "', this target is '" + target_->arch + "'");
    }
}

void Drafter::check_seq(int32_t seq) const {
    if (seq < 0 || seq >= cache_->n_seq()) {
        throw std::invalid_argument("no sequence " + std::to_string(seq) + ", the drafter has " +
                                    std::to_string(cache_->n_seq()));
    }
}

void Drafter::need_weights() const {
    if (backend_.planned) {
        throw std::invalid_argument("the drafter is only planned, beside a planned target: it has no weights");
    }
}

std::vector<MemoryUse> Drafter::memory() const {
    const std::string device = ggml_backend_dev_name(target_->device);
    return {{device, "weights", weight_bytes()},
            {device, "output matrix", target_->n_bytes_owned},
            {device, "cache", cache_bytes()},
            {device, "compute", compute_bytes()}};
}

void Drafter::check_operations(ggml_cgraph * graph) const {
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const ggml_tensor * node = ggml_graph_node(graph, i);
        if (!ggml_backend_supports_op(backend_.get(), node)) {
            const ggml_tensor * operand = main_operand(node);
            throw BackendError("device '" + backend_.name() + "' cannot run the drafter's operation " +
                               ggml_op_desc(node) +
                               (operand ? std::string(" on ") + ggml_type_name(operand->type) : ""));
        }
    }
}

int32_t Drafter::length(int32_t seq) const {
    check_seq(seq);
    return cache_->length(seq);
}

int32_t Drafter::reusable(int32_t seq, int32_t n) const {
    check_seq(seq);
    return cache_->reusable(seq, n);
}

void Drafter::truncate(int32_t seq, int32_t n) {
    check_seq(seq);
    cache_->truncate(seq, n);
}

void Drafter::allocate_graph(ggml_cgraph * graph) {
    check_operations(graph);  // what a device can do may depend on a graph's shapes
    if (backend_.planned) {
        size_t n_bytes = 0;
        ggml_gallocr_reserve_n_size(allocator_.get(), graph, nullptr, nullptr, &n_bytes);
        planned_compute_ = std::max(planned_compute_, n_bytes);
        return;
    }
    // Graphs run one after another and share one buffer. Those kept ready point into it, and ggml frees it before it
    // makes a larger one: whether it grew or failed to, they are built again.
    const size_t before = compute_bytes();
    const bool fits = ggml_gallocr_alloc_graph(allocator_.get(), graph);
    if (!fits || compute_bytes() != before) {
        commit_graphs_.clear();
        draft_graphs_.clear();
    }
    if (!fits) {
        throw BackendError("device '" + backend_.name() + "' has no room for the drafter's compute buffer");
    }
}

void Drafter::compute(ggml_cgraph * graph, const char * what) {
    const ggml_status status = ggml_backend_graph_compute(backend_.get(), graph);
    if (status != GGML_STATUS_SUCCESS) {
        throw BackendError("device '" + backend_.name() + "' failed to " + what + ": " + ggml_status_to_string(status));
    }
}

void Drafter::commit(const std::vector<FeatureRows> & all) {
    need_weights();
    for (const FeatureRows & rows : all) {
        check_seq(rows.seq);
        if (rows.taps.size() != config_.target_layers.size()) {
            throw std::invalid_argument("features of " + std::to_string(rows.taps.size()) +
                                        " taps, the drafter reads " + std::to_string(config_.target_layers.size()));
        }
        if (rows.n < 1 || rows.n > cache_->n_ctx() - cache_->length(rows.seq)) {
            throw ContextLengthError("cannot append " + std::to_string(rows.n) + " positions to the " +
                                     std::to_string(cache_->length(rows.seq)) + " of sequence " +
                                     std::to_string(rows.seq) + ": its cache ends at " +
                                     std::to_string(cache_->n_ctx()));
        }
    }
    for (const FeatureRows & rows : all) {
        // Two positions of one graph must not share a cell of a ring.
        int32_t chunk = COMMIT_CHUNK;
        if (cache_->has(LayerKind::sliding)) {
            chunk = static_cast<int32_t>(std::min<int64_t>(chunk, cache_->n_cells(LayerKind::sliding)));
        }
        // Where every layer slides, what has left the window by the end is never read.
        const int32_t unread =
            config_.all_sliding() ? rows.n - static_cast<int32_t>(cache_->n_cells(LayerKind::sliding)) : 0;
        for (int32_t first = std::max(0, unread); first < rows.n; first += chunk) {
            commit_chunk(rows, first, std::min(chunk, rows.n - first));
        }
        cache_->append(rows.seq, rows.n);
    }
}

void Drafter::commit_chunk(const FeatureRows & rows, int32_t first, int32_t n) {
    auto found =
        std::find_if(commit_graphs_.begin(), commit_graphs_.end(), [&](const auto & e) { return e.first == n; });
    if (found == commit_graphs_.end()) {
        CommitGraph built = build_commit_graph(parts(), n);
        allocate_graph(built.graph);
        if (commit_graphs_.size() >= MAX_GRAPHS) {
            commit_graphs_.erase(commit_graphs_.begin());
        }
        commit_graphs_.emplace_back(n, std::move(built));
    } else {
        std::rotate(found, found + 1, commit_graphs_.end());
    }
    const CommitGraph & g = commit_graphs_.back().second;

    const size_t row_bytes = static_cast<size_t>(config_.n_embd) * sizeof(float);
    for (size_t tap = 0; tap < rows.taps.size(); ++tap) {
        const float * src = rows.taps[tap] + static_cast<size_t>(first) * rows.stride;
        ggml_backend_tensor_set_2d(g.features, src, tap * row_bytes, row_bytes, static_cast<size_t>(n),
                                   g.features->nb[1], rows.stride * sizeof(float));
    }
    const int32_t start = cache_->length(rows.seq) + first;
    std::vector<int32_t> positions(static_cast<size_t>(n));
    for (int32_t i = 0; i < n; ++i) {
        positions[static_cast<size_t>(i)] = start + i;
    }
    upload(g.positions, positions);
    for (const LayerKind kind : {LayerKind::full, LayerKind::sliding}) {
        if (ggml_tensor * input = g.rows[static_cast<int>(kind)]) {
            std::vector<int64_t> cells(static_cast<size_t>(n));
            for (int32_t i = 0; i < n; ++i) {
                cells[static_cast<size_t>(i)] = cache_->row(kind, rows.seq, start + i);
            }
            upload(input, cells);
        }
    }
    cache_->note_written(rows.seq, start + n);
    compute(g.graph, "commit features");
}

DraftShape Drafter::shape_for(const std::vector<BlockRequest> & blocks, int32_t n_draft, bool trace) const {
    DraftShape shape;
    shape.n_draft = n_draft;
    // A bidirectional block cannot be cut short: every slot sees all others.
    shape.n_slots = config_.causal ? n_draft + 1 : config_.block_size;
    shape.order = trace ? TransitionOrder::full : order_;
    shape.trace = trace;
    for (const BlockRequest & block : blocks) {
        shape.seqs.push_back(block.seq);
        for (const LayerKind kind : {LayerKind::full, LayerKind::sliding}) {
            shape.n_kv[static_cast<int>(kind)].push_back(
                cache_->has(kind) ? cache_->n_visible(kind, block.seq, shape.n_slots) : 0);
        }
    }
    return shape;
}

DraftGraph & Drafter::prepare(const std::vector<BlockRequest> & blocks, const DraftShape & shape) {
    auto found =
        std::find_if(draft_graphs_.begin(), draft_graphs_.end(), [&](const auto & g) { return g.shape == shape; });
    if (found == draft_graphs_.end()) {
        DraftGraph built = build_draft_graph(parts(), shape);
        allocate_graph(built.graph);
        if (draft_graphs_.size() >= MAX_GRAPHS) {
            draft_graphs_.erase(draft_graphs_.begin());
        }
        draft_graphs_.push_back(std::move(built));
    } else {
        std::rotate(found, found + 1, draft_graphs_.end());
    }
    DraftGraph & g = draft_graphs_.back();

    const size_t n_blocks = blocks.size();
    const size_t n_cols = n_blocks * static_cast<size_t>(shape.n_slots);
    std::vector<float> embd(n_blocks * static_cast<size_t>(config_.n_embd));
    std::vector<int32_t> anchors(n_blocks);
    std::vector<int32_t> positions(n_cols);
    for (size_t b = 0; b < n_blocks; ++b) {
        anchors[b] = blocks[b].anchor;
        RowReader(target_->token_embd).read(blocks[b].anchor, embd.data() + b * static_cast<size_t>(config_.n_embd));
        for (int32_t j = 0; j < shape.n_slots; ++j) {
            positions[static_cast<size_t>(j) * n_blocks + b] = cache_->length(blocks[b].seq) + j;
        }
    }
    upload(g.anchor_embd, embd);
    if (g.anchors != nullptr) {
        upload(g.anchors, anchors);
    }
    upload(g.positions, positions);
    if (g.positions_from_1 != nullptr) {
        upload(g.positions_from_1, std::vector<int32_t>(positions.begin() + std::ptrdiff_t(n_blocks), positions.end()));
    }
    for (const LayerKind kind : {LayerKind::full, LayerKind::sliding}) {
        const int i = static_cast<int>(kind);
        if (g.rows[i] == nullptr) {
            continue;
        }
        std::vector<int64_t> cells(n_cols);
        for (size_t col = 0; col < n_cols; ++col) {
            cells[col] = cache_->row(kind, blocks[col % n_blocks].seq, positions[col]);
        }
        upload(g.rows[i], cells);
        for (size_t b = 0; b < n_blocks; ++b) {
            std::vector<ggml_fp16_t> mask(static_cast<size_t>(ggml_nelements(g.masks[i][b])));
            cache_->fill_mask(kind, blocks[b].seq, shape.n_slots, shape.n_kv[i][b], mask.data());
            upload(g.masks[i][b], mask);
        }
    }
    for (const BlockRequest & block : blocks) {
        cache_->note_written(block.seq, cache_->length(block.seq) + shape.n_slots);
    }
    return g;
}

std::vector<Draft> Drafter::read_drafts(const DraftGraph & g) const {
    const size_t n_blocks = g.shape.seqs.size();
    const size_t n_draft = static_cast<size_t>(g.shape.n_draft);
    if (config_.injection && g.shape.order == TransitionOrder::full) {
        return walk_scores(download<float>(g.scores), download<int32_t>(g.candidates), g.shape.n_blocks(),
                           g.shape.n_draft, config_.top_k);
    }
    const std::vector<int32_t> out = download<int32_t>(config_.injection ? g.path : g.candidates);
    const size_t width = config_.injection ? 2 : 1;
    std::vector<Draft> drafts(n_blocks);
    for (size_t col = 0; col < n_blocks * n_draft; ++col) {
        Draft & draft = drafts[col % n_blocks];
        draft.tokens.push_back(out[col * width]);
        if (config_.injection) {
            float probability;
            std::memcpy(&probability, &out[col * width + 1], sizeof(float));
            draft.probabilities.push_back(probability);
        }
    }
    return drafts;
}

std::vector<Draft> Drafter::draft(const std::vector<BlockRequest> & blocks, int32_t n_draft) {
    if (n_draft < 1 || n_draft > config_.max_draft()) {
        throw std::invalid_argument("cannot draft " + std::to_string(n_draft) + " tokens, expected 1 to " +
                                    std::to_string(config_.max_draft()));
    }
    std::vector<bool> seen(static_cast<size_t>(cache_->n_seq()), false);
    for (const BlockRequest & block : blocks) {
        check_seq(block.seq);
        if (seen[static_cast<size_t>(block.seq)]) {
            throw std::invalid_argument("sequence " + std::to_string(block.seq) + " has two blocks in one call");
        }
        seen[static_cast<size_t>(block.seq)] = true;
        if (block.anchor < 0 || block.anchor >= config_.n_vocab) {
            throw std::invalid_argument("anchor token " + std::to_string(block.anchor) +
                                        " is outside the vocabulary of " + std::to_string(config_.n_vocab));
        }
        if (cache_->length(block.seq) < 1) {
            throw std::invalid_argument("sequence " + std::to_string(block.seq) + " has no committed features");
        }
    }
    if (blocks.empty()) {
        return {};
    }
    const DraftGraph & g = prepare(blocks, shape_for(blocks, n_draft, false));
    compute(g.graph, "draft");
    return read_drafts(g);
}

}  // namespace dspine
