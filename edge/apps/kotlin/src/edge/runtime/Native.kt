package edge.runtime

import java.io.File

/** The functions of jni/. Callers pass only open handles; one thread at a time uses a session. */
internal object Native {
    init {
        try {
            System.loadLibrary("edge")
        } catch (missing: UnsatisfiedLinkError) {
            loadBundled(missing)
        }
    }

    /** The library in the JAR for desktop JVMs. */
    private fun loadBundled(missing: UnsatisfiedLinkError) {
        val machine = if (System.getProperty("os.arch") == "amd64") "x86_64" else System.getProperty("os.arch")
        val found = Native::class.java.getResourceAsStream("libedge-$machine.so") ?: throw missing
        val file = File.createTempFile("libedge", ".so")
        found.use { from -> file.outputStream().use { from.copyTo(it) } }
        System.load(file.path)
        file.delete() // it stays loaded
    }

    /** [path] ends with a zero byte; if it is null, [fd] is an open file. */
    @JvmStatic external fun open(path: ByteArray?, fd: Int, offset: Long, length: Long): Long
    @JvmStatic external fun close(model: Long)
    /** Structs are bytes in C's layout. */
    @JvmStatic external fun info(model: Long, info: ByteArray)
    /** A text of edge_model_info, by its address. */
    @JvmStatic external fun text(address: Long): ByteArray

    @JvmStatic external fun begin(
        model: Long, options: ByteArray, isa: ByteArray?, cache: ByteArray?, npu: ByteArray?,
        stop: Array<ByteArray>,
    ): Long
    @JvmStatic external fun set(session: Long, options: ByteArray, isa: ByteArray?, stop: Array<ByteArray>)
    @JvmStatic external fun constrain(session: Long, form: Int, text: ByteArray)
    /** [biases]: of edge_logit_bias. */
    @JvmStatic external fun bias(session: Long, biases: ByteArray)
    @JvmStatic external fun read(session: Long, readings: ByteArray)
    @JvmStatic external fun end(session: Long)
    @JvmStatic external fun append(session: Long, role: Int, text: ByteArray)
    @JvmStatic external fun appendIds(session: Long, ids: IntArray)
    /**
     * Returns token, finish reason and length of the text in bits 32 to 63, 16 to 31 and 0 to 15. [prompt]: its tokens that have
     * run, and all of them.
     */
    @JvmStatic external fun next(session: Long, text: ByteArray, prompt: IntArray): Long
    /** From any thread. */
    @JvmStatic external fun cancel(session: Long)
    @JvmStatic external fun rewind(session: Long, turns: Int)
    /** Returns the bytes of the state, which go to [buffer] or else to [fd]; -1: only counts. */
    @JvmStatic external fun save(session: Long, fd: Int, buffer: ByteArray?): Long
    @JvmStatic external fun load(session: Long, fd: Int, buffer: ByteArray?)
    /** Reads [adapter], or else [fd]; -1: removes the adapter. */
    @JvmStatic external fun setAdapter(session: Long, fd: Int, adapter: ByteArray?, scale: Double)
    @JvmStatic external fun trim(session: Long, level: Int)
    @JvmStatic external fun use(session: Long, usage: ByteArray)
    /** Returns the number of threads that compute, the calling one included. */
    @JvmStatic external fun threads(session: Long, ids: IntArray): Int
    @JvmStatic external fun tokenize(session: Long, text: ByteArray, special: Int, ids: IntArray?): Long
    /** [texts]: one behind the other. [vectors]: room for floats. */
    @JvmStatic external fun embed(
        session: Long, texts: ByteArray, lengths: IntArray, prompt: ByteArray?, dimensions: Int, unscaled: Int,
        truncate: Int, vectors: ByteArray,
    )
    /** [ears] ends with a zero byte; if it is null, [fd] is an open file; -1: the ears are open already. */
    @JvmStatic external fun listen(
        session: Long, ears: ByteArray?, fd: Int, offset: Long, length: Long, hearing: ByteArray, language: ByteArray?,
        prompt: ByteArray?,
    )
    /**
     * Hears [samples] from [from] on; none: the sound has ended. Returns the samples that were taken and, in bits 32 to 63,
     * the finish reason.
     */
    @JvmStatic external fun hear(session: Long, samples: ShortArray, from: Int, segment: ByteArray): Long
    /** [eyes] as `ears` of [listen]. [colors]: 0xAARRGGBB. */
    @JvmStatic external fun image(
        session: Long, eyes: ByteArray?, fd: Int, offset: Long, length: Long, colors: IntArray, width: Int, height: Int,
        tokens: Int,
    )
    /** [sounds] as `ears` of [listen]. */
    @JvmStatic external fun sound(
        session: Long, sounds: ByteArray?, fd: Int, offset: Long, length: Long, samples: FloatArray, rate: Int,
    )
    @JvmStatic external fun soundTokens(model: Long, count: Int, rate: Int): Int
    /** [tools]: null: none. */
    @JvmStatic external fun tools(session: Long, tools: ByteArray?)
    /** [choice] ends with a zero byte. */
    @JvmStatic external fun choose(session: Long, choice: ByteArray, parallel: Int)
    /** The number of calls. */
    @JvmStatic external fun calls(session: Long): Int
    /** A call's identifier (0), name (1) or arguments (2). */
    @JvmStatic external fun call(session: Long, index: Int, field: Int): ByteArray
    @JvmStatic external fun imageTokens(model: Long, width: Int, height: Int, tokens: Int): Int
}

/** A path as C reads it, which ends with a zero byte. */
internal fun pathBytes(path: String): ByteArray {
    require('\u0000' !in path) { "the path contains the character U+0000" }
    return path.encodeToByteArray() + 0
}
