package edge.runtime

/**
 * Plays a sound, mono samples of 16 bits, [rate] of them a second, which stands before the text that is asked or appended next,
 * as a picture does. It is encoded now. [sounds]: the path of the bundle's sounds.edge. [EdgeSession.rewind] of 0 turns takes
 * sounds back that wait for a text. Throws EdgeException with [Status.UNSUPPORTED] if the bundle hears no sounds in prompts,
 * [Status.FULL] if the sound does not fit.
 */
public suspend fun EdgeSession.sound(samples: ShortArray, rate: Int, sounds: String): Unit =
    sound(samples, rate, pathBytes(sounds), -1, 0, 0)

/** With sounds.edge as a part of an open file that begins at a multiple of 64 bytes; in assets, see `assetPath`. */
public suspend fun EdgeSession.sound(samples: ShortArray, rate: Int, fd: Int, offset: Long = 0, length: Long = 0): Unit =
    sound(samples, rate, null, fd, offset, length)

/** Tokens of a sound of [count] samples, before it is encoded. Throws EdgeException as [sound] does. */
public fun EdgeModel.soundTokens(count: Int, rate: Int): Int {
    require(count > 0) { "a sound of $count samples" }
    return call { Native.soundTokens(it, count, rate) }
}

private suspend fun EdgeSession.sound(
    samples: ShortArray,
    rate: Int,
    sounds: ByteArray?,
    fd: Int,
    offset: Long,
    length: Long,
) {
    val floats = FloatArray(samples.size) { samples[it] / 32768f }
    change { Native.sound(it, sounds, fd, offset, length, floats, rate) }
}
