/* Plans of earlier calls, kept by what they depend on: planning costs several times the rest of a call. */
#include "tensor.h"

#include <string.h>

/* A direct-mapped table: a call whose slot is taken by another product plans again. */
#define SLOTS 128

/* A plan depends on addresses by their low bits alone: what they are aligned to, for vectors, cp.async and TMA. */
#define ALIGNMENT_MASK 255

/* All but the addresses; compared byte by byte, so without padding. */
typedef struct key {
    int64_t m, n, k;
    int64_t strides[6];
    uint8_t low_bits[3]; /* of the addresses of a, b and c */
    uint8_t in_dtype, out_dtype, batch_ndim, batch_invariant, used;
    int32_t device, family, kernel, swap;
    tcg_batch_dim batch[TCG_MAX_BATCH_DIMS]; /* batch_ndim of them */
} key;
_Static_assert(offsetof(key, batch) == 96, "no padding");

struct tcg_plan_slot {
#ifdef Py_GIL_DISABLED
    atomic_flag busy;
#endif
    key key;
    const void *a, *b; /* the addresses that the plan holds */
    void *c;
    tcg_plan plan;
};

tcg_plan_slot *tcg_plans_new(void) { return PyMem_RawCalloc(SLOTS, sizeof(tcg_plan_slot)); }

/* With the GIL nothing comes between a look and its use; without it a busy slot is left alone. */
static bool take(tcg_plan_slot *slot) {
#ifdef Py_GIL_DISABLED
    return !atomic_flag_test_and_set_explicit(&slot->busy, memory_order_acquire);
#else
    (void)slot;
    return true;
#endif
}

static void give(tcg_plan_slot *slot) {
#ifdef Py_GIL_DISABLED
    atomic_flag_clear_explicit(&slot->busy, memory_order_release);
#else
    (void)slot;
#endif
}

/* Bytes of the key that are used. */
static size_t make_key(const tcg_problem *p, int device, const tcg_options *options, key *k) {
    const void *const addresses[] = {p->a.data, p->b.data, p->c.data};
    *k = (key){
        .m = p->m,
        .n = p->n,
        .k = p->k,
        .strides = {p->a.row, p->a.col, p->b.row, p->b.col, p->c.row, p->c.col},
        .in_dtype = (uint8_t)p->in_dtype,
        .out_dtype = (uint8_t)p->out_dtype,
        .batch_ndim = (uint8_t)p->batch_ndim,
        .batch_invariant = options->batch_invariant,
        .used = 1,
        .device = device,
        .family = options->family,
        .kernel = options->kernel,
        .swap = options->swap,
    };
    for (int i = 0; i < 3; i++)
        k->low_bits[i] = (uint8_t)((uintptr_t)addresses[i] & ALIGNMENT_MASK);
    memcpy(k->batch, p->batch, (size_t)p->batch_ndim * sizeof *p->batch);
    return offsetof(key, batch) + (size_t)p->batch_ndim * sizeof *p->batch;
}

static size_t slot_of(const key *k, size_t bytes) {
    const unsigned char *at = (const unsigned char *)k;
    uint64_t hash = 0, word;
    for (size_t i = 0; i < bytes; i += sizeof word) {
        memcpy(&word, at + i, sizeof word);
        hash = (hash ^ word) * 0x9E3779B97F4A7C15u; /* 2^64 over the golden ratio: Knuth's multiplicative hash */
        hash ^= hash >> 32;
    }
    return hash % SLOTS;
}

static const void *moved(const void *address, const void *from, const void *to) {
    return address ? (const void *)((uintptr_t)address + ((uintptr_t)to - (uintptr_t)from)) : NULL;
}

/* The slot's plan for other addresses. A pointer that is NULL will be the workspace's. */
static void copy_plan(const tcg_plan_slot *slot, const tcg_problem *p, tcg_plan *plan) {
    *plan = slot->plan;
    const void *const from[] = {slot->a, slot->b}, *const to[] = {p->a.data, p->b.data};
    const int a = plan->swap, b = !plan->swap; /* which of the caller's operands the kernel's are */
    plan->args.a = moved(plan->args.a, from[a], to[a]);
    plan->args.b = moved(plan->args.b, from[b], to[b]);
    plan->args.c = (void *)moved(plan->args.c, slot->c, p->c.data);
    plan->copy_a.src = moved(plan->copy_a.src, from[a], to[a]);
    plan->copy_b.src = moved(plan->copy_b.src, from[b], to[b]);
    plan->result.c = (void *)moved(plan->result.c, slot->c, p->c.data);
}

int tcg_plan_cached(tcg_state *state, const tcg_problem *problem, int device, const tcg_device_props *props,
                    const tcg_options *options, tcg_plan *plan, tcg_error *err) {
    key k;
    const size_t bytes = make_key(problem, device, options, &k);
    tcg_plan_slot *slot = &state->plans[slot_of(&k, bytes)];
    bool known = false;

    if (take(slot)) {
        known = !memcmp(&slot->key, &k, bytes);
        if (known)
            copy_plan(slot, problem, plan);
        give(slot);
    }
    if (known)
        return 0;
    if (tcg_plan_make(problem, props, options, plan, err))
        return -1;
    if (take(slot)) {
        slot->key = k;
        slot->a = problem->a.data;
        slot->b = problem->b.data;
        slot->c = problem->c.data;
        slot->plan = *plan;
        give(slot);
    }
    return 0;
}
