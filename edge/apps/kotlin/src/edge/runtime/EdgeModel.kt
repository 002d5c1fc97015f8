package edge.runtime

import java.io.Closeable

/**
 * A model of a bundle that `edge export` made: model.edge, mapped into memory.
 *
 *     EdgeModel.open("/data/model.edge").use { model ->
 *         model.session().use { session ->
 *             session.answer("Why is the sky blue?").collect { print(it) }
 *         }
 *     }
 *
 * All functions may be called from any thread. They block; those that read the file or allocate belong off the main
 * thread.
 */
public class EdgeModel private constructor(private var handle: Long) : Closeable {
    private val sessions = mutableSetOf<EdgeSession>()

    public val info: ModelInfo = struct(ModelInfo.BYTES).let {
        Native.info(handle, it.array())
        ModelInfo.of(it)
    }

    /** A conversation, whose memory is allocated now. [sensors] are read while it generates. */
    @JvmOverloads
    public fun session(options: EdgeOptions = EdgeOptions(), sensors: Sensors? = null): EdgeSession =
        synchronized(sessions) {
            check(handle != 0L) { "the model is closed" }
            val native = Native.begin(
                handle,
                options.bytes(),
                options.isaBytes(),
                options.cacheBytes(),
                options.npuBytes(),
                options.stopBytes(),
            )
            EdgeSession(this, native, sensors, info.threads, options.power).also { sessions += it }
        }

    internal fun <T> call(work: (Long) -> T): T = synchronized(sessions) {
        check(handle != 0L) { "the model is closed" }
        work(handle)
    }

    internal fun forget(session: EdgeSession) = synchronized(sessions) { sessions -= session }

    /** Closes its sessions, too: cancels running answers and waits for their end. */
    override fun close() {
        val open = synchronized(sessions) { sessions.toList() }
        open.forEach { it.close() }
        synchronized(sessions) {
            if (handle != 0L) Native.close(handle)
            handle = 0
        }
    }

    public companion object {
        /** Throws [EdgeException] with [Status.BAD_FILE] if [path] is not a model.edge of this version. */
        @JvmStatic
        public fun open(path: String): EdgeModel = EdgeModel(Native.open(pathBytes(path), -1, 0, 0))

        /** From a part of an open file, which may be closed afterwards. It begins at a multiple of 64 bytes. */
        @JvmStatic
        @JvmOverloads
        public fun open(fd: Int, offset: Long = 0, length: Long = 0): EdgeModel =
            EdgeModel(Native.open(null, fd, offset, length))
    }
}
