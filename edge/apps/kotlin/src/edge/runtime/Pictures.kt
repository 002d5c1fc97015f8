package edge.runtime

import android.graphics.Bitmap

/**
 * Shows a picture, which stands before the text that is asked or appended next; several stand there in their order. It is
 * encoded now, which takes as long as a prompt of some hundred tokens. [bitmap] is upright; what is transparent is white.
 * [eyes]: the path of the bundle's eyes.edge. [tokens]: the most that the picture may have; 0: as many as the bundle was
 * exported for. [EdgeSession.rewind] of 0 turns takes pictures back that wait for a text. Throws EdgeException with
 * [Status.UNSUPPORTED] if the bundle has no eyes, [Status.FULL] if the picture does not fit.
 */
public suspend fun EdgeSession.image(bitmap: Bitmap, eyes: String, tokens: Int = 0): Unit =
    image(colors(bitmap), bitmap.width, bitmap.height, eyes, tokens)

/** With eyes.edge as a part of an open file that begins at a multiple of 64 bytes; in assets, see `assetPath`. */
public suspend fun EdgeSession.image(
    bitmap: Bitmap,
    fd: Int,
    offset: Long = 0,
    length: Long = 0,
    tokens: Int = 0,
): Unit = image(colors(bitmap), bitmap.width, bitmap.height, tokens, null, fd, offset, length)

/** Of [colors], row by row, as Android and Java have them: 0xAARRGGBB. */
public suspend fun EdgeSession.image(colors: IntArray, width: Int, height: Int, eyes: String, tokens: Int = 0): Unit =
    image(colors, width, height, tokens, pathBytes(eyes), -1, 0, 0)

/** Tokens of a picture of this size, before it is encoded. Throws EdgeException as [image] does. */
public fun EdgeModel.imageTokens(width: Int, height: Int, tokens: Int = 0): Int {
    require(width > 0 && height > 0 && tokens >= 0) { "a picture of $width × $height pixels, $tokens tokens" }
    return call { Native.imageTokens(it, width, height, tokens) }
}

private suspend fun EdgeSession.image(
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

/** Its colors, not premultiplied. Those of a bitmap in the GPU's memory are copied first. */
private fun colors(bitmap: Bitmap): IntArray {
    val readable = if (bitmap.config == Bitmap.Config.HARDWARE) bitmap.copy(Bitmap.Config.ARGB_8888, false) else bitmap
    val colors = IntArray(Math.multiplyExact(bitmap.width, bitmap.height))
    readable.getPixels(colors, 0, bitmap.width, 0, 0, bitmap.width, bitmap.height)
    return colors
}
