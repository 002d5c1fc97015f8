package android.graphics

/** Pixels as Android's documentation has them: a bitmap in the GPU's memory cannot be read. */
class Bitmap(val width: Int, val height: Int, val config: Config?, private val colors: IntArray) {
    enum class Config { ARGB_8888, RGB_565, HARDWARE }

    fun copy(config: Config, isMutable: Boolean): Bitmap = Bitmap(width, height, config, colors)

    fun getPixels(pixels: IntArray, offset: Int, stride: Int, x: Int, y: Int, width: Int, height: Int) {
        check(config != Config.HARDWARE) { "unable to getPixels(), pixel access is not supported on Config#HARDWARE bitmaps" }
        for (row in 0 until height) colors.copyInto(pixels, offset + row * stride, (y + row) * this.width + x, (y + row) * this.width + x + width)
    }
}
