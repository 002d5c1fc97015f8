package edge.runtime

/**
 * Shows a picture, which stands before the text that is asked or appended next; several stand there in their order. It is
 * encoded now, which takes as long as a prompt of some hundred tokens. [colors]: row by row, upright, as Android and Java have
 * them: 0xAARRGGBB; what is transparent is white. [eyes]: the path of the bundle's eyes.edge. [tokens]: the most that the
 * picture may have; 0: as many as the bundle was exported for. [EdgeSession.rewind] of 0 turns takes pictures back that wait for
 * a text. Throws EdgeException with [Status.UNSUPPORTED] if the bundle has no eyes, [Status.FULL] if the picture does not fit.
 */
public suspend fun EdgeSession.image(colors: IntArray, width: Int, height: Int, eyes: String, tokens: Int = 0): Unit =
    image(colors, width, height, tokens, pathBytes(eyes), -1, 0, 0)

/** Tokens of a picture of this size, before it is encoded. Throws EdgeException as [image] does. */
public fun EdgeModel.imageTokens(width: Int, height: Int, tokens: Int = 0): Int {
    require(width > 0 && height > 0 && tokens >= 0) { "a picture of $width × $height pixels, $tokens tokens" }
    return call { Native.imageTokens(it, width, height, tokens) }
}

internal suspend fun EdgeSession.image(
    colors: IntArray,
    width: Int,
    height: Int,
    tokens: Int,
    eyes: ByteArray?,
    fd: Int,
    offset: Long,
    length: Long,
) {
    require(width > 0 && height > 0 && colors.size.toLong() == width.toLong() * height) {
        "${colors.size} colors for $width × $height pixels"
    }
    require(tokens >= 0) { "tokens is $tokens, but must not be negative" }
    change { Native.image(it, eyes, fd, offset, length, colors, width, height, tokens) }
}
