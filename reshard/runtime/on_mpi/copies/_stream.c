/* Strided copies whose stores go past the caches; `stream_copy` says which copies come here, and why.
 *
 * A processor reads a cache line before it writes to a part of it, a third of a copy's traffic, unless a store of the
 * whole line is non-temporal. Python and memcpy have no such store for short runs. Where the compiler has none either,
 * lines are copied by memcpy, and only the order, in which a tile is walked from its beginning to its end, is better.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum {
    LINE = 64,       /* Bytes of a cache line. */
    SHORT = 2 << 10, /* Bytes of a run below which a gap behind it is fetched, too. */
    AHEAD = 4        /* How many runs ahead the ends of a run are fetched. */
};

#if defined(__SSE2__) || defined(_M_X64)
#include <emmintrin.h>
enum { NON_TEMPORAL = 1 };
static void store_line(char *target, const char *source)
{
    __m128i a = _mm_loadu_si128((const __m128i *)source), b = _mm_loadu_si128((const __m128i *)source + 1);
    __m128i c = _mm_loadu_si128((const __m128i *)source + 2), d = _mm_loadu_si128((const __m128i *)source + 3);
    _mm_stream_si128((__m128i *)target, a);
    _mm_stream_si128((__m128i *)target + 1, b);
    _mm_stream_si128((__m128i *)target + 2, c);
    _mm_stream_si128((__m128i *)target + 3, d);
}

/* A line that has just been put together: words that one store has written are loaded without waiting for it. */
static void store_joined_line(char *target, const char *source)
{
#if defined(__x86_64__) || defined(_M_X64)
    for (int at = 0; at < LINE; at += 8) {
        long long word;
        memcpy(&word, source + at, 8);
        _mm_stream_si64((long long *)(target + at), word);
    }
#else
    store_line(target, source);
#endif
}
static void fetch_line(const char *source) { _mm_prefetch(source, _MM_HINT_NTA); }
static void claim_line(const char *target) { _mm_prefetch(target, _MM_HINT_T0); }

/* Non-temporal stores may pass later ones: without the fence, another rank could see "done" before the data. */
static void finish(void) { _mm_sfence(); }
#elif defined(__aarch64__) && defined(__GNUC__)
enum { NON_TEMPORAL = 1 };
static void store_line(char *target, const char *source)
{
    __asm__ volatile("ldp q0, q1, [%1]\n\tldp q2, q3, [%1, #32]\n\tstnp q0, q1, [%0]\n\tstnp q2, q3, [%0, #32]"
                     : : "r"(target), "r"(source) : "v0", "v1", "v2", "v3", "memory");
}
static void store_joined_line(char *target, const char *source) { store_line(target, source); }
static void fetch_line(const char *source) { __builtin_prefetch(source, 0, 0); }
static void claim_line(const char *target) { __builtin_prefetch(target, 1, 3); }
static void finish(void) { __asm__ volatile("dmb ish" : : : "memory"); }
#else
enum { NON_TEMPORAL = 0 };
static void store_line(char *target, const char *source) { memcpy(target, source, LINE); }
static void store_joined_line(char *target, const char *source) { store_line(target, source); }
static void fetch_line(const char *source) { (void)source; }
static void claim_line(const char *target) { (void)target; }
static void finish(void) {}
#endif

/* Fewer bytes than a line, without a call: the first and the last words of them, which may overlap. */
static void copy_part(char *target, const char *source, int64_t bytes)
{
    if (bytes >= 32) {
        memcpy(target, source, 32);
        memmove(target + bytes - 32, source + bytes - 32, 32);
    } else if (bytes >= 16) {
        memcpy(target, source, 16);
        memmove(target + bytes - 16, source + bytes - 16, 16);
    } else if (bytes >= 8) {
        memcpy(target, source, 8);
        memmove(target + bytes - 8, source + bytes - 8, 8);
    } else
        for (; bytes > 0; bytes--)
            *target++ = *source++;
}

/* The beginning of a line whose end the next run may bring: then it is one store as well. */
typedef struct { char *target; int64_t bytes; char line[LINE]; } Rest;

static void settle_rest(Rest *rest)
{
    if (rest->bytes)
        copy_part(rest->target, rest->line, rest->bytes);
    rest->bytes = 0;
}

static void copy_run(Rest *rest, char *target, const char *source, int64_t bytes)
{
    int64_t part = -(intptr_t)target & (LINE - 1);
    part = part < bytes ? part : bytes;
    if (rest->bytes && target == rest->target + rest->bytes) {
        copy_part(rest->line + rest->bytes, source, part);
        rest->bytes += part;
        if (rest->bytes == LINE) {
            store_joined_line(rest->target, rest->line);
            rest->bytes = 0;
        }
    } else {
        settle_rest(rest);
        copy_part(target, source, part);
    }
    for (target += part, source += part, bytes -= part; bytes >= LINE; bytes -= LINE, source += LINE, target += LINE)
        store_line(target, source);
    if (bytes) {
        rest->target = target, rest->bytes = bytes;
        copy_part(rest->line, source, bytes);
    }
}

/* copy_boxes(table, bytes): about so many bytes of what is left of some boxes, or all of it.
 *
 * The table is written to: it says how far the boxes have come. It has 64-bit numbers, as the types here do: a head, the
 * boxes, their axes, and one number for each box. A box is nested loops around runs of bytes. The boxes of one row of a
 * tile, on the side on which the copies walk, go together, in the order of their runs there.
 */
typedef struct { int64_t boxes, axes, by_source, row, origin; } Head;
typedef struct { int64_t source, target, run, done, axes, inner, end, left, row; } Box;
typedef struct { int64_t extent, source, target, index; } Axis;

/* Goes to the next index of some axes, the last one first; whether there is one, or all are back at the first. */
static int next_index(Box *box, Axis *axes, int64_t first, int64_t end)
{
    for (int64_t at = end - 1; at >= first; at--) {
        Axis *axis = axes + at;
        box->source += axis->source, box->target += axis->target;
        if (++axis->index < axis->extent)
            return 1;
        box->source -= axis->extent * axis->source, box->target -= axis->extent * axis->target;
        axis->index = 0;
    }
    return 0;
}

static void copy_rows(Head *head, int64_t wanted)
{
    Box *boxes = (Box *)(head + 1), *end = boxes + head->boxes;
    Axis *axes = (Axis *)end;
    int64_t *active = (int64_t *)(axes + head->axes), by_source = head->by_source, count = 0;
    Rest rest = {0};
    for (Box *box = boxes; box < end; box++)
        if (box->left < 0) /* In the row that is being copied. */
            active[count++] = box - boxes;
    for (; wanted > 0;) {
        if (!count) {
            int64_t row = INT64_MAX;
            for (Box *box = boxes; box < end; box++) {
                if (!box->left || box->row > row)
                    continue;
                if (box->row < row)
                    row = box->row, count = 0;
                active[count++] = box - boxes;
            }
            if (!count)
                break;
            for (int64_t at = 0; at < count; at++)
                boxes[active[at]].left = -boxes[active[at]].left;
        }
        int64_t last = INT64_MAX, gap = 0; /* Where the run before ended, and how far behind it lines are fetched. */
        while (count && wanted > 0) {
            int64_t first = 0, lowest = INT64_MAX;
            for (int64_t at = 0; at < count; at++) {
                Box *box = boxes + active[at];
                int64_t place = by_source ? box->source : box->target;
                if (place < lowest)
                    lowest = place, first = at;
            }
            Box *box = boxes + active[first];
            int64_t part = box->run - box->done < wanted + LINE ? box->run - box->done : wanted;
            if (by_source && box->source > last && box->source - last <= gap)
                for (int64_t line = last; line < box->source; line += LINE)
                    fetch_line((const char *)(intptr_t)line);
            copy_run(&rest, (char *)(intptr_t)(box->target + box->done),
                     (const char *)(intptr_t)(box->source + box->done), part);
            wanted -= part;
            if ((box->done += part) < box->run)
                break;
            box->done = 0;
            last = box->source + box->run, gap = box->run < SHORT ? 3 * box->run : 0;
            if (next_index(box, axes, box->inner, box->end)) {
                /* Lines at the ends of a run are read before they are written to, so that is begun early. */
                intptr_t ahead = (intptr_t)(box->target + AHEAD * axes[box->end - 1].target);
                if (by_source && ahead & (LINE - 1))
                    claim_line((const char *)ahead);
                if (by_source && (ahead + box->run) & (LINE - 1))
                    claim_line((const char *)ahead + box->run);
                continue;
            }
            box->left = -box->left - 1;
            if (next_index(box, axes, box->axes, box->inner) && head->row)
                box->row = ((by_source ? box->source : box->target) - head->origin) / head->row;
            active[first] = active[--count];
        }
    }
    settle_rest(&rest);
    finish();
}

static PyObject *copy_boxes(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    Py_buffer table;
    long long wanted;
    if (!PyArg_ParseTuple(arguments, "w*L", &table, &wanted))
        return NULL;
    Head *head = (Head *)table.buf;
    int fits = table.len >= (Py_ssize_t)sizeof *head && head->boxes >= 0 && head->axes >= 0 &&
               head->boxes <= table.len && head->axes <= table.len &&
               table.len == (Py_ssize_t)(sizeof *head + head->boxes * (sizeof(Box) + 8) + head->axes * sizeof(Axis));
    if (fits) {
        Py_BEGIN_ALLOW_THREADS
        copy_rows(head, wanted);
        Py_END_ALLOW_THREADS
    } else
        PyErr_SetString(PyExc_ValueError, "the table has another size than its head says");
    PyBuffer_Release(&table);
    return fits ? Py_NewRef(Py_None) : NULL;
}

#if defined(__GNUC__) && (defined(__unix__) || defined(__APPLE__))
#include <sched.h>
#include <stdlib.h>

/* A small move of `repeated`, whole: the rank stages its tile, posts what it requests, waits for the others for a while,
 * and copies what it needs. Addresses and bytes; `words` are those of `node_sync`.
 */
enum { UNUSUAL = 0, MOVED = 1, POSTED = 2 }; /* Nothing has been done; all; all but the copies to the result. */
typedef struct {
    int64_t words, ranks, me, line, heads[2], log, looks, yields; /* A member has `line` words. */
    int64_t stages[2], shift, itemsize, ndim[2], bytes[2], boxes; /* Of the tile, and of the result. */
    int64_t rest[]; /* The shapes of both, and boxes: source, target, run, how many axes, and these. */
} Small;
typedef struct { PyObject *kind; char format[8]; Small small; } Exchange;

static void free_exchange(PyObject *capsule)
{
    Exchange *made = PyCapsule_GetPointer(capsule, NULL);
    Py_XDECREF(made->kind);
    free(made);
}

static PyObject *prepare_exchange(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const char *numbers, *format;
    Py_ssize_t size;
    PyObject *kind;
    if (!PyArg_ParseTuple(arguments, "y#Os", &numbers, &size, &kind, &format))
        return NULL;
    Exchange *made = size < (Py_ssize_t)sizeof(Small) ? NULL : malloc(sizeof *made + size);
    if (!made || strlen(format) >= sizeof made->format)
        return free(made), PyErr_SetString(PyExc_ValueError, "the numbers of a small move, its arrays' type, a format"), NULL;
    memcpy(&made->small, numbers, size);
    strcpy(made->format, format);
    made->kind = Py_NewRef(kind);
    return PyCapsule_New(made, NULL, free_exchange);
}

/* Whether an array has this shape and format, and lies in order: then its buffer has been taken. */
static int take_buffer(Exchange *made, PyObject *array, int end, const int64_t *shape, Py_buffer *view)
{
    if ((PyObject *)Py_TYPE(array) != made->kind)
        return 0;
    if (PyObject_GetBuffer(array, view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS | (end ? PyBUF_WRITABLE : 0))) {
        PyErr_Clear();
        return 0;
    }
    int fits = view->ndim == made->small.ndim[end] && strcmp(view->format, made->format) == 0;
    for (int at = 0; fits && at < view->ndim; at++)
        fits = view->shape[at] == shape[at];
    fits = fits && (intptr_t)view->buf % made->small.itemsize == 0;
    if (!fits)
        PyBuffer_Release(view);
    return fits;
}

static int have_all_posted(const Small *small, int64_t number, int64_t synced)
{
    int64_t *words = (int64_t *)(intptr_t)small->words;
    for (int64_t rank = 0; rank < small->ranks; rank++) {
        int64_t *line = words + rank * small->line;
        if (__atomic_load_n(line, __ATOMIC_ACQUIRE) < synced || line[small->heads[synced & 1]] != number)
            return 0;
    }
    return 1;
}

static const int64_t *copy_small_box(const int64_t *box, char *target, int64_t shift)
{
    const char *source = (const char *)(intptr_t)box[0] + shift;
    int64_t run = box[2], ndim = box[3], index[64] = {0};
    const int64_t *axes = box + 4;
    target += box[1];
    for (;;) {
        int64_t extent = ndim ? axes[3 * ndim - 3] : 1, by = ndim ? axes[3 * ndim - 2] : 0, to = ndim ? axes[3 * ndim - 1] : 0;
        if (run == 8)
            for (int64_t at = 0; at < extent; at++)
                memcpy(target + at * to, source + at * by, 8);
        else if (run == 4)
            for (int64_t at = 0; at < extent; at++)
                memcpy(target + at * to, source + at * by, 4);
        else
            for (int64_t at = 0; at < extent; at++)
                memcpy(target + at * to, source + at * by, (size_t)run);
        int64_t at = ndim - 2;
        for (; at >= 0; at--) {
            source += axes[3 * at + 1], target += axes[3 * at + 2];
            if (++index[at] < axes[3 * at])
                break;
            source -= axes[3 * at] * axes[3 * at + 1], target -= axes[3 * at] * axes[3 * at + 2], index[at] = 0;
        }
        if (at < 0)
            return axes + 3 * ndim;
    }
}

/* exchange(prepared, tile, result, number, synced, logged): what has been done. */
static PyObject *exchange(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count)
{
    Exchange *made = count == 6 ? PyCapsule_GetPointer(arguments[0], NULL) : NULL;
    if (!made)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "exchange takes 6 arguments");
    const Small *small = &made->small;
    const int64_t *shapes = small->rest, *boxes = shapes + small->ndim[0] + small->ndim[1];
    int64_t number = PyLong_AsLongLong(arguments[3]), synced = PyLong_AsLongLong(arguments[4]);
    int64_t logged = PyLong_AsLongLong(arguments[5]);
    Py_buffer tile, result;
    if (PyErr_Occurred())
        return NULL;
    if (!take_buffer(made, arguments[1], 0, shapes, &tile))
        return PyLong_FromLong(UNUSUAL);
    if (!take_buffer(made, arguments[2], 1, shapes + small->ndim[0], &result)) {
        PyBuffer_Release(&tile);
        return PyLong_FromLong(UNUSUAL);
    }
    int outcome = UNUSUAL;
    char *from = tile.buf, *to = result.buf;
    if (from + tile.len <= to || to + result.len <= from) {
        int64_t half = synced & 1, *line = (int64_t *)(intptr_t)small->words + small->me * small->line;
        int64_t *head = line + small->heads[half];
        memcpy((char *)(intptr_t)small->stages[half], from, (size_t)tile.len);
        head[0] = number, head[1] = -number, head[small->log] = logged;
        __atomic_store_n(line, synced, __ATOMIC_RELEASE);
        int all = have_all_posted(small, number, synced);
        if (!all) {
            Py_BEGIN_ALLOW_THREADS
            for (int64_t look = 0; !all && look < small->looks; look++)
                all = have_all_posted(small, number, synced);
            for (int64_t yield = 0; !all && yield < small->yields; yield++) {
                sched_yield();
                all = have_all_posted(small, number, synced);
            }
            Py_END_ALLOW_THREADS
        }
        for (int64_t box = 0; all && box < small->boxes; box++)
            boxes = copy_small_box(boxes, to, half * small->shift);
        outcome = all ? MOVED : POSTED;
    }
    PyBuffer_Release(&tile);
    PyBuffer_Release(&result);
    return PyLong_FromLong(outcome);
}
#define EXCHANGE \
    {"prepare_exchange", prepare_exchange, METH_VARARGS, NULL}, \
    {"exchange", (PyCFunction)(void (*)(void))exchange, METH_FASTCALL, NULL},
#else
#define EXCHANGE
#endif

static PyMethodDef functions[] = {{"copy_boxes", copy_boxes, METH_VARARGS, NULL}, EXCHANGE {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_stream", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__stream(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddObjectRef(made, "is_non_temporal", NON_TEMPORAL ? Py_True : Py_False) < 0)
        Py_CLEAR(made);
    return made;
}
