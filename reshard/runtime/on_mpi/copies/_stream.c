/* Strided copies whose stores go past the caches; `stream_copy` says which copies come here, and why.
 *
 * A processor reads a cache line before it writes to a part of it, a third of a copy's traffic, unless the store is
 * non-temporal. Python and memcpy have no such store for runs of this length. Where the compiler has none either, runs
 * are copied by memcpy, and only the order, in which the tile is read from its beginning to its end, is better.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { LINE = 64, MOST_AXES = 64 }; /* Bytes of a cache line; numpy's arrays have no more axes. */

#if defined(__SSE2__) || defined(_M_X64)
#include <emmintrin.h>
enum { NON_TEMPORAL = 1 };

/* Runs and targets are multiples of 16 bytes; a source may lie anywhere. */
static void copy_run(char *target, const char *source, int64_t bytes)
{
    for (; bytes >= LINE; bytes -= LINE, source += LINE, target += LINE) { /* A whole line is one write to memory. */
        __m128i a = _mm_loadu_si128((const __m128i *)source), b = _mm_loadu_si128((const __m128i *)source + 1);
        __m128i c = _mm_loadu_si128((const __m128i *)source + 2), d = _mm_loadu_si128((const __m128i *)source + 3);
        _mm_stream_si128((__m128i *)target, a);
        _mm_stream_si128((__m128i *)target + 1, b);
        _mm_stream_si128((__m128i *)target + 2, c);
        _mm_stream_si128((__m128i *)target + 3, d);
    }
    for (; bytes > 0; bytes -= 16, source += 16, target += 16)
        _mm_stream_si128((__m128i *)target, _mm_loadu_si128((const __m128i *)source));
}

static void fetch_run(const char *source, int64_t bytes)
{
    for (; bytes > 0; bytes -= LINE, source += LINE)
        _mm_prefetch(source, _MM_HINT_NTA);
}

/* Non-temporal stores may pass later ones: without the fence, another rank could see "done" before the data. */
static void finish(void) { _mm_sfence(); }
#else
enum { NON_TEMPORAL = 0 };
static void copy_run(char *target, const char *source, int64_t bytes) { memcpy(target, source, (size_t)bytes); }
static void fetch_run(const char *source, int64_t bytes) { (void)source, (void)bytes; }
static void finish(void) {}
#endif

typedef struct { int64_t extent, source, target; } Axis;
typedef struct { int64_t source, target; } Start;

/* copy_runs(table, low, high): the bytes from `low` to `high` of each copy, counted along its runs, row by row.
 *
 * The table has 64-bit numbers: the bytes of a run, how many axes there are, and how many copies go together; each
 * axis, outermost first: extent and byte strides; each copy: the addresses of its first run. A copy with target 0 is a
 * gap between the others: its lines are fetched, so that the source is read in order, and nothing is written.
 */
static PyObject *copy_runs(PyObject *Py_UNUSED(module), PyObject *arguments)
{
    const char *table;
    Py_ssize_t size;
    long long low, high;
    if (!PyArg_ParseTuple(arguments, "y#LL", &table, &size, &low, &high))
        return NULL;
    const int64_t *head = (const int64_t *)table;
    if (size < 3 * (Py_ssize_t)sizeof *head || head[0] <= 0 || head[1] < 0 || head[2] < 0) {
        PyErr_SetString(PyExc_ValueError, "the table has no head: bytes of a run, axes, copies");
        return NULL;
    }
    const int64_t run = head[0], ndim = head[1], copies = head[2];
    const Axis *axes = (const Axis *)(head + 3);
    const Start *starts = (const Start *)(axes + ndim);
    if (ndim > MOST_AXES || size != (Py_ssize_t)((const char *)(starts + copies) - table)) {
        PyErr_SetString(PyExc_ValueError, "the table has another size than its head says");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    int64_t index[MOST_AXES], source = 0, target = 0, row = low / run, skip = low % run;
    for (int64_t at = ndim - 1; at >= 0; row /= axes[at].extent, at--) {
        index[at] = row % axes[at].extent;
        source += index[at] * axes[at].source;
        target += index[at] * axes[at].target;
    }
    while (low < high) {
        int64_t part = run - skip < high - low ? run - skip : high - low;
        for (const Start *each = starts; each < starts + copies; each++) {
            const char *from = (const char *)(intptr_t)(each->source + source + skip);
            if (each->target)
                copy_run((char *)(intptr_t)(each->target + target + skip), from, part);
            else
                fetch_run(from, part);
        }
        low += part, skip = 0;
        for (int64_t at = ndim - 1; at >= 0; at--) {
            source += axes[at].source, target += axes[at].target;
            if (++index[at] < axes[at].extent)
                break;
            source -= index[at] * axes[at].source, target -= index[at] * axes[at].target;
            index[at] = 0;
        }
    }
    finish();
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {{"copy_runs", copy_runs, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_stream", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__stream(void)
{
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddIntConstant(made, "NON_TEMPORAL", NON_TEMPORAL) < 0)
        Py_CLEAR(made);
    return made;
}
