package edge.runtime

import java.nio.ByteBuffer
import java.nio.ByteOrder

/** Options of a session, as `edge run` has them. */
data class EdgeOptions(
    // generated: Options
    /** CPU threads. Null: the cores of the fastest cluster, as far as the bundle has room for them. */
    val threads: Int? = null,
    /** Bit i: threads may run on CPU i. Null: all of them. */
    val cpuMask: Long? = null,
    /** Instruction set, such as dotprod; read when a session begins only. Null: the best of this CPU. */
    val isa: String? = null,
    /** 0 is greedy: the same answer every time. Null: as the model recommends. */
    val temperature: Double? = null,
    /** Draw from the k likeliest; 0 is off. Null: as the model recommends. */
    val topK: Int? = null,
    /** Draw from the likeliest that make up p; 1 is off. Null: as the model recommends. */
    val topP: Double? = null,
    /** Drop tokens below p times the likeliest; 0 is off. Null: as the model recommends. */
    val minP: Double? = null,
    /** Penalty on the last 64 tokens; 1 is off. Null: as the model recommends. */
    val repeatPenalty: Double? = null,
    /** Seed of the draws. Null: a new one for every answer. */
    val seed: Long? = null,
    /** Tokens to generate. Null: no limit. */
    val maxTokens: Int? = null,
    /** Never end the turn; go on. */
    val ignoreEos: Boolean = false,
    /** Texts before which an answer ends: 16 of 128 bytes at most. */
    val stop: List<String> = emptyList(),
    /** Seconds that an answer and the prompt before it may take. Null: no limit. */
    val time: Double? = null,
    /** Joules that an answer and the prompt before it may cost, estimated without readings. Null: no limit. */
    val energy: Double? = null,
    /** Watts on average, estimated without readings; held by pauses. Null: no limit. */
    val power: Double? = null,
    /** Degrees Celsius that the processor may have, by readings; held by pauses. Null: no limit. */
    val maxTemp: Double? = null,
    /** Thermal headroom that may be used up, by readings, as Android counts: 1 is where the system throttles; held by
     * pauses. Null: no limit. */
    val headroom: Double? = null,
    // end
) {
    init {
        require(threads == null || threads > 0) { "threads is $threads, but must be at least 1" }
        require(maxTokens == null || maxTokens > 0) { "maxTokens is $maxTokens, but must be at least 1" }
        require(stop.none { '\u0000' in it }) { "a stop text contains the character U+0000, on which C texts end" }
    }

    internal fun bytes() =
        // generated: OptionsBytes
        struct(144)
            .putInt(4, threads ?: 0)
            .putLong(8, cpuMask ?: 0)
            .putDouble(24, temperature ?: -1.0)
            .putInt(32, topK ?: -1)
            .putDouble(40, topP ?: -1.0)
            .putDouble(48, minP ?: -1.0)
            .putDouble(56, repeatPenalty ?: -1.0)
            .putInt(64, if (seed == null) 0 else 1)
            .putLong(72, seed ?: 0)
            .putInt(80, maxTokens ?: 0)
            .putInt(84, if (ignoreEos) 1 else 0)
            .putDouble(104, time ?: 0.0)
            .putDouble(112, energy ?: 0.0)
            .putDouble(120, power ?: 0.0)
            .putDouble(128, maxTemp ?: 0.0)
            .putDouble(136, headroom ?: 0.0)
            .array()
        // end

    internal fun isaBytes() = isa?.encodeToByteArray()

    internal fun stopBytes() = Array(stop.size) { stop[it].encodeToByteArray() }
}

/** Who speaks. */
enum class Role {
    // generated: Role
    /** Before the first turn. Its KV rows stay when others are evicted, as far as the plan has room. */
    SYSTEM,
    /** A turn. Its text never becomes a control token. */
    USER,
    /** An answer from an earlier conversation. */
    ASSISTANT,
    /** Text without the chat template, in which control tokens are recognized. */
    RAW,
    // end
}

/** Why an answer ended, in the order of edge.h. */
enum class Finish {
    // generated: Finish
    GOING, EOS, STOP, LENGTH, CAPACITY, INTERRUPTED, TIME, ENERGY, POWER, THERMAL, MEMORY
    // end
    ;

    internal companion object {
        fun of(code: Int) = entries.getOrElse(code) { INTERRUPTED } // a reason that a later runtime may add
    }
}

/** A part of an answer: whole characters, perhaps none. [token] is -1 for the rest of a text. */
data class Piece(val text: String, val token: Int, val finish: Finish)

/** How much memory [EdgeSession.trim] gives back: what costs nothing, half of what can be spared, all of it. */
enum class Trim {
    // generated: Trim
    SOFT, HALF, ALL
    // end
}

/** What the app measures; null: not known. */
data class Readings(
    // generated: Readings
    /** Consumed since a fixed moment. Read them before a prompt, too: what is spent since is estimated. */
    val joules: Double? = null,
    /** Temperature of the processor. */
    val celsius: Double? = null,
    /** Android's thermal headroom: 1 is where the system throttles. */
    val headroom: Double? = null,
    /** Bytes that this process may still take. */
    val available: Long? = null,
    // end
) {
    internal fun bytes() =
        // generated: ReadingsBytes
        struct(40)
            .putDouble(8, joules ?: -1.0)
            .putDouble(16, celsius ?: -1.0)
            .putDouble(24, headroom ?: -1.0)
            .putLong(32, available ?: -1)
            .array()
        // end
}

/** Read about twice a second while an answer is generated, by the thread that generates. */
fun interface Sensors {
    fun read(): Readings
}

/** What a model and its plan are. */
data class ModelInfo(
    // generated: ModelInfo
    val name: String,
    val license: String,
    /** By which KV rows are evicted. */
    val policy: String,
    /** Type of KV rows. */
    val kvDtype: String,
    /** The best instruction set of this CPU. */
    val isa: String,
    /** Tokens. */
    val vocab: Int,
    /** Positions that the model has learned. */
    val context: Int,
    /** KV rows. */
    val capacity: Int,
    /** The most threads of a session. */
    val threads: Int,
    /** Whether there is a chat template. */
    val chat: Boolean,
    /** Bytes of weights; as the next two, planned for one session. */
    val weights: Long,
    /** Bytes of KV rows. */
    val kv: Long,
    /** Bytes of scratch memory. */
    val scratch: Long,
    // end
) {
    // generated: ModelInfoRead
    internal companion object {
        const val BYTES = 96

        fun of(struct: ByteBuffer) = ModelInfo(
            name = Native.text(struct.getLong(8)).decodeToString(),
            license = Native.text(struct.getLong(16)).decodeToString(),
            policy = Native.text(struct.getLong(24)).decodeToString(),
            kvDtype = Native.text(struct.getLong(32)).decodeToString(),
            isa = Native.text(struct.getLong(40)).decodeToString(), vocab = struct.getInt(48),
            context = struct.getInt(52), capacity = struct.getInt(56), threads = struct.getInt(60),
            chat = struct.getInt(64) != 0, weights = struct.getLong(72), kv = struct.getLong(80),
            scratch = struct.getLong(88),
        )
    }
    // end
}

/** What a session has used. */
data class Usage(
    // generated: Usage
    /** Rows of the KV cache in use. */
    val rows: Int,
    /** Rows that the cache has. */
    val capacity: Int,
    val threads: Int,
    /** Bytes of weights. */
    val weights: Long,
    /** Bytes of KV rows. */
    val kv: Long,
    /** Bytes of scratch memory. */
    val scratch: Long,
    /** Bytes of model.edge that are mapped. */
    val file: Long,
    /** Tokens that ran since the session began. */
    val tokens: Long,
    /** Rows that the policy evicted. */
    val evicted: Long,
    /** Of the last answer and its prompt, as are the seconds. */
    val joules: Double,
    val seconds: Double,
    /** Whether the app read the joules; otherwise they are estimated. */
    val measured: Boolean,
    // end
) {
    // generated: UsageRead
    internal companion object {
        const val BYTES = 88

        fun of(struct: ByteBuffer) = Usage(
            rows = struct.getInt(4), capacity = struct.getInt(8), threads = struct.getInt(12),
            weights = struct.getLong(16), kv = struct.getLong(24), scratch = struct.getLong(32),
            file = struct.getLong(40), tokens = struct.getLong(48), evicted = struct.getLong(56),
            joules = struct.getDouble(64), seconds = struct.getDouble(72), measured = struct.getInt(80) != 0,
        )
    }
    // end
}

/** A struct of edge.h as C lays it out, which begins with its size. */
internal fun struct(size: Int): ByteBuffer = ByteBuffer.allocate(size).order(ByteOrder.nativeOrder()).putInt(0, size)
